"""A service started from this terminal: Ray if there is none, the application on it, and all of it gone at the end.

With RAY_ADDRESS set it joins that cluster and, at the end, removes the application and leaves the cluster alone.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, LoggingConfig

from cluster.adapters.store import KvAdapterStore
from cluster.app import build_application, with_device_decided, worker_deployments
from cluster.commands.ask import ask, is_ready
from cluster.commands.deploy_errors import setup_error_in, start_ray
from cluster.commands.fleet_line import LastTold, fleet_line
from cluster.commands.stop_signals import StopSignals
from cluster.commands.terminal import report
from cluster.config import ServiceConfig, check_gpus
from cluster.rpc.front import FUNCTION_FOR_THIS_HOST, SERVICER_FUNCTION
from cluster.rpc.probe import is_serving
from cluster.serving.haproxy_script import LOOPBACK
from planner.errors import SetupError

APP_NAME = "raycomb"
OBJECT_STORE_BYTES = 80 * 2**20
"""Nothing of ours goes through Ray's object store; this is about the least that Ray takes."""
POLL_S = 0.25
WATCH_S = 2.0
STILL_STARTING_S = 20.0
"""A line is told again after so long, so that nobody takes a model that loads for a service that hangs."""
SHUTDOWN_MARGIN_S = 10.0
DRAIN_NOTICE_S = 2.0
FAREWELL_S = 2.0  # for errors to reach their clients

logger = logging.getLogger(__name__)


class LocalService:
    """One run of `raycomb serve`, on the main thread. It only ever waits in turns, so that a signal is seen at once.

    Clients come to `host`. `behind_haproxy`: of a cluster of our own; what is behind it is for this host alone.
    """

    def __init__(
        self, config: ServiceConfig, *, host: str, port: int, grpc_port: int | None, behind_haproxy: bool
    ) -> None:
        self._config = config
        self._host = host
        self._behind_haproxy = behind_haproxy
        self._port = port
        self._grpc_port = grpc_port
        self._joins_cluster = bool(os.environ.get("RAY_ADDRESS"))
        self._signals = StopSignals()
        self._told = LastTold()

    @property
    def url(self) -> str:
        """Where this machine reaches the service."""
        return f"http://{self._near_host}:{self._port}"

    @property
    def _near_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)

    @property
    def grpc_target(self) -> str | None:
        """Where this machine reaches the service by gRPC, if it does."""
        return None if self._grpc_port is None else f"{self._near_host}:{self._grpc_port}"

    def run(self, question: str | None) -> int:
        """Serve until a signal comes, or only until `question` is answered; the exit code.

        Raises `SetupError` when the service cannot start; nothing is then left of it.
        """
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with self._signals, self._cluster():
            self._signals.install()
            if self._joins_cluster:
                _check_that_none_runs()
            config = self._on_this_machine()
            for deployment in worker_deployments(config):  # a cluster that runs may know of another service's
                KvAdapterStore(APP_NAME, deployment).clear()
            with self._application(build_application(config)):
                if not self._wait_until_ready(config):
                    return 130
                if question is not None:
                    key = config.http.api_keys[0].get_secret_value() if config.http.api_keys else None
                    return ask(self.url, config.model_name, question, key)
                self._greet(config)
                self._watch(config)
        return 0

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """Ray: the cluster of RAY_ADDRESS, or one of our own that ends with us."""
        config = self._config
        if self._joins_cluster:
            start_ray(lambda: ray.init(log_to_driver=False, logging_level=logging.WARNING))
        else:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster for this machine alone
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            of_workers = sum(one.most_workers * one.worker_cpus for one in config.each)
            needed = math.ceil(of_workers + config.num_gateways * config.gateway_cpus)
            report("starting Ray")
            start_ray(
                lambda: ray.init(
                    address="local",
                    num_cpus=max(needed, len(os.sched_getaffinity(0))),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            )
        try:
            yield
        finally:
            ray.shutdown()

    def _on_this_machine(self) -> ServiceConfig:
        """The service with its device decided and, on the CPUs of a cluster of our own, the cores shared out."""
        config = with_device_decided(self._config)
        if self._joins_cluster:
            return config
        check_gpus(config, ray.cluster_resources())  # type: ignore[no-untyped-call]
        num_workers = sum(one.most_workers for one in config.each if one.engine.device == "cpu")
        return config.with_threads(max(1, len(os.sched_getaffinity(0)) // max(1, num_workers)))

    @contextmanager
    def _application(self, application: Application) -> Iterator[None]:
        """The application while it is deployed. Nothing here waits for it to run."""
        try:
            serve.start(
                http_options={"host": LOOPBACK if self._behind_haproxy else self._host, "port": self._port},
                grpc_options=self._grpc_options(),
                logging_config=self._logging(),
            )
        except (RayError, RuntimeError, TimeoutError) as error:  # what a front raised that did not come up
            raise SetupError(f"the front could not start: {str(error).strip().splitlines()[-1]}") from error
        self._signals.looks_begin()
        target = RunTarget(target=application, name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        try:
            yield
        finally:
            report("shutting down")
            if self._joins_cluster or is_ready(self.url):  # else Serve would wait for workers that still load
                self._end_in_order()

    def _end_in_order(self) -> None:
        """Once Serve is told, it has no route to the gateways any more and tells clients 404, so they first say
        themselves, with a 503, that they drain; and what takes too long ends with an error, and not with its
        connection."""
        patience_ends = time.monotonic() + self._config.drain_timeout_s
        _asked_of_gateways("drain")
        if not self._none_open_by(patience_ends):
            _asked_of_gateways("give_up")
            self._none_open_by(time.monotonic() + FAREWELL_S)
        serve.delete(APP_NAME, _blocking=False)
        while APP_NAME in serve.status().applications and time.monotonic() < patience_ends + SHUTDOWN_MARGIN_S:
            time.sleep(POLL_S)

    def _logging(self) -> LoggingConfig:
        """Serve's own lines on each request go by its ids and paths; ours say more."""
        if self._config.log_requests:
            return LoggingConfig(log_level="INFO", encoding="JSON", enable_access_log=False)
        return LoggingConfig(log_level="WARNING", enable_access_log=False)

    def _grpc_options(self) -> dict[str, Any] | None:
        if self._grpc_port is None:
            return None
        function = FUNCTION_FOR_THIS_HOST if self._behind_haproxy else SERVICER_FUNCTION
        return {"port": self._grpc_port, "grpc_servicer_functions": [function]}

    def _none_open_by(self, time_s: float) -> bool:
        """Whether gateways have no request to answer any more by then; waits for it."""
        while sum(_asked_of_gateways("num_open")):
            if time.monotonic() >= time_s:
                return False
            time.sleep(POLL_S)
        return True

    def _wait_until_ready(self, config: ServiceConfig) -> bool:
        """Tell of progress until a client would be served; False if a signal came first.

        Raises the `SetupError` that keeps workers from starting, as soon as one says so.
        """
        started_at = time.monotonic()
        for one in config.each:
            report(f"loading {one.engine.model} on {one.engine.device}")
        while not self._signals.wanted.wait(POLL_S):
            overview = serve.status().applications.get(APP_NAME)
            if overview is None:
                continue
            _raise_setup_error(overview)
            now, line = time.monotonic(), _line(overview, config)
            if self._told.is_news(line, now, STILL_STARTING_S):
                report(f"{line} ({now - started_at:.0f} s)")
            if overview.status == "RUNNING" and self._answers():
                return True
        return False

    def _watch(self, config: ServiceConfig) -> None:
        """Tell of workers and gateways that go and come, until a signal comes."""
        while not self._signals.wanted.wait(WATCH_S):
            try:
                overview = serve.status().applications.get(APP_NAME)
            except (RayError, RayServeException) as error:  # Ray's own part starts anew
                logger.debug("Serve could not say how the fleet is: %s", error)
                continue
            if overview is not None and self._told.is_news(line := _line(overview, config), time.monotonic()):
                report(f"{line} ({time.strftime('%H:%M:%S')})")

    def _answers(self) -> bool:
        return is_ready(self.url) and (self.grpc_target is None or is_serving(self.grpc_target))

    def _greet(self, config: ServiceConfig) -> None:
        grpc = "" if self.grpc_target is None else f" and by gRPC at {self.grpc_target}"
        report(f"ready at {self.url}{grpc} (Ctrl-C ends it)")
        key = ' -H "Authorization: Bearer $KEY"' if config.http.api_keys or config.http.keys else ""
        messages = '[{"role": "user", "content": "Hello"}]'
        body = f'{{"model": "{config.model_name}", "max_tokens": 64, "messages": {messages}}}'
        if config.others:
            print(f"\n  models: {config.model_names}")
        print(f"\n  in a browser: {self.url}/")
        print(f"\n  curl {self.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n")


def _asked_of_gateways(method: str) -> list[Any]:
    """What each gateway answers; nothing where not all of them do within `DRAIN_NOTICE_S`."""
    try:
        answers: list[Any] = (
            serve.get_deployment_handle("Gateway", APP_NAME).broadcast(method).results(timeout_s=DRAIN_NOTICE_S)
        )
    except (KeyError, RayError, RayServeException, TimeoutError) as error:
        logger.debug("not every gateway answered %s: %s", method, error)
        return []
    return answers


def _check_that_none_runs() -> None:
    """Raises `SetupError` where the cluster has a service already: this one would replace it, and at its end both were
    gone."""
    if APP_NAME in serve.status().applications:
        raise SetupError(
            f"the cluster of RAY_ADDRESS={os.environ['RAY_ADDRESS']} runs an application {APP_NAME!r} already: "
            "`serve status` shows it, and `serve deploy` changes it"
        )


def _raise_setup_error(overview: ApplicationStatusOverview) -> None:
    messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
    for message in messages:
        if (error := setup_error_in(message)) is not None:
            raise error
    if overview.status == "DEPLOY_FAILED":
        raise SetupError(f"the application could not be deployed: {' '.join(filter(None, messages))}")


def _line(overview: ApplicationStatusOverview, config: ServiceConfig) -> str:
    states: dict[str, dict[str, int]] = {
        name: dict(deployment.replica_states.items()) for name, deployment in overview.deployments.items()
    }
    workers = [states.get(name, {}) for name in worker_deployments(config)]
    return fleet_line(workers, states.get("Gateway", {}), config)
