"""The application: what `serve deploy` and the `raycomb` command hand to Ray Serve."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.access.shared_secret import cluster_secret
from cluster.config import ServiceConfig, decide_devices, service_config
from cluster.gateway import Gateway
from cluster.routing.membership_router import MembershipRouter
from cluster.serving.scaling_policy import LoadPolicy
from cluster.sessions.keeper import KeeperSettings, SessionKeeper
from cluster.sessions.owner import session_limits
from cluster.telemetry.otlp_settings import with_otlp_of
from cluster.worker import Worker

MAX_ONGOING_REQUESTS = 100_000
"""Of one gateway. Serve must not queue in front of it: admission is ours, with typed refusals."""

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 10.0
GATEWAY_HEALTH_CHECK_TIMEOUT_S = 40.0
"""Of a gateway, which Serve replaces when three checks in a row are not answered in time. One that clients keep too
busy to answer must not be: they would come to the others, which would be next. A gateway that died is seen at once all
the same, and one that is frozen HAProxy passes over within 10 s."""

SHUTDOWN_MARGIN_S = 5.0

WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "50000"}
"""A worker shares its host with gateways and proxies. OpenMP's threads spin at barriers, long enough by default that
where one of them has lost its core the others keep it from coming back: a 40 ms step took over a second. With 20,000
turns they fall asleep some twenty times a step of a small model beside nothing but our own gateway, which made a step
of 20 ms one of 28; with 50,000 four times, and on a busy host both are equally slow."""


def build(args: dict[str, Any]) -> Application:
    """The application for the settings of a Serve YAML (`ServiceConfig`).

    Raises `InvalidConfiguration` that names the setting at fault.
    """
    return build_application(service_config(args))


def build_application(config: ServiceConfig) -> Application:
    """Bind the deployments: workers for each model, and the gateways of all. Decides the device where it was left open:
    CUDA if the cluster has a GPU."""
    config = with_otlp_of(with_device_decided(config).with_secret(cluster_secret()), os.environ)
    workers = [_workers(one, name) for one, name in zip(config.each, worker_deployments(config), strict=True)]
    gateways = serve.deployment(
        name="Gateway",
        num_replicas=config.num_gateways,
        ray_actor_options={"num_cpus": config.gateway_cpus},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=GATEWAY_HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_timeout_s + SHUTDOWN_MARGIN_S,
        max_surge_percent=100,  # they are cheap; an old one goes when its successor can serve
    )(Gateway)
    return gateways.bind(config, workers, _session_keeper(config))


def worker_deployments(config: ServiceConfig) -> list[str]:
    """Names of the deployments of each model's workers."""
    return ["Worker", *(f"Worker-{number}" for number in range(2, len(config.others) + 2))]


def _workers(config: ServiceConfig, name: str) -> Application:
    """The deployment of one model's workers."""
    num_gpus = 1 if config.engine.device == "cuda" else 0
    return serve.deployment(
        name=name,
        **_number_of_workers(config),
        ray_actor_options={
            "num_cpus": config.worker_cpus,
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
        },
        max_ongoing_requests=64,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_timeout_s + SHUTDOWN_MARGIN_S,
        request_router_config=RequestRouterConfig(request_router_class=MembershipRouter),  # type: ignore[arg-type]
    )(Worker).bind(config)


def _session_keeper(config: ServiceConfig) -> Application | None:
    """One for all gateways, however many there are or will be; none where there may be no sessions."""
    if config.http.max_sessions == 0:
        return None
    settings = KeeperSettings(session_limits(config.http), config.secret, config.data_plane_host, config.data_plane_tls)
    return serve.deployment(
        name="Sessions",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=SHUTDOWN_MARGIN_S,
        request_router_config=RequestRouterConfig(request_router_class=MembershipRouter),  # type: ignore[arg-type]
    )(SessionKeeper).bind(settings)


def _number_of_workers(config: ServiceConfig) -> dict[str, Any]:
    """What Serve is told of it: a number, or a policy."""
    if config.max_workers is None:
        return {"num_replicas": config.num_workers}
    scaling = config.scaling
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LoadPolicy,
        policy_kwargs={"target_use": scaling.target_use, "target_queue_s": scaling.target_queue_s},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_workers or 1,
            initial_replicas=config.num_workers,
            max_replicas=config.max_workers,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            metrics_interval_s=scaling.report_interval_s,
            look_back_period_s=scaling.look_back_s,
            policy=policy,
        )
    }


def with_device_decided(config: ServiceConfig) -> ServiceConfig:
    """`config` for the cluster that this process is connected to, if any."""
    resources: dict[str, float] = ray.cluster_resources() if ray.is_initialized() else {}  # type: ignore[no-untyped-call]
    return decide_devices(config, resources)
