"""`raycomb serve`: from flags to a running service and back to nothing. Free of Ray until the front is chosen."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.commands.before_ray import check_before_ray
from cluster.commands.serve_flags import add_arguments
from cluster.commands.serve_models import told_models
from cluster.commands.terminal import report
from cluster.config import ServiceConfig, service_config
from cluster.serving.front import (
    DEFAULT_GRPC_PORT,
    EVERY_ADDRESS,
    Front,
    check_port,
    choose_front,
    choose_grpc_port,
    front_environment,
)
from planner.errors import InvalidConfiguration

__all__ = ["add_arguments", "execute", "make_plan", "read_keys"]

OTLP: Final = ("otlp_endpoint", "otlp_protocol")


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What `raycomb serve` shall do.

    * `grpc_port`: None: no gRPC.
    * `ask`: put this question to the service once it is ready, then shut down.
    """

    service: ServiceConfig
    host: str
    port: int
    grpc_port: int | None
    front: Front
    ask: str | None


def execute(args: argparse.Namespace) -> int:
    """Serve until a signal comes; the exit code. Raises `SetupError` when it cannot be."""
    plan = make_plan(args)
    with front_environment(plan.front, plan.host) as variables:
        behind_haproxy = False
        if not os.environ.get("RAY_ADDRESS"):  # a cluster that runs already has its front already
            os.environ.update(variables)
            behind_haproxy = plan.front is Front.HAPROXY
        from cluster.commands.local_service import LocalService  # imports Ray, which reads the environment at import

        service = LocalService(
            plan.service, host=plan.host, behind_haproxy=behind_haproxy, port=plan.port, grpc_port=plan.grpc_port
        )
        return service.run(plan.ask)


def make_plan(args: argparse.Namespace) -> ServePlan:
    """Check everything that can be checked before a process is started; fetch the checkpoint if need be."""
    if args.ask is not None and args.api_keys_file is not None and not args.api_key:
        raise InvalidConfiguration(
            "--ask needs an --api-key: of those in --api-keys-file only hashes are known", param="ask"
        )
    service = service_config(_settings(args))
    check_port(args.host, args.port)
    front = choose_front(args.front)
    grpc_port = _grpc_port(args, front)
    check_before_ray(service, os.environ.get("RAY_ADDRESS") or None)
    return ServePlan(service, args.host, args.port, grpc_port, front, args.ask)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `ServiceConfig`."""
    settings = {
        "models": told_models(args),
        "http": {
            "api_keys": args.api_key or (),
            "admin_keys": args.admin_key or (),
            "batch_store": None if args.batch_store is None else str(Path(args.batch_store).absolute()),
            "keys": () if args.api_keys_file is None else read_keys(args.api_keys_file),
        },
        "num_gateways": args.num_gateways,
        "log_requests": args.log_requests,
    }
    for name in ("data_plane_host", "drain_timeout_s", *OTLP):
        if (value := getattr(args, name)) is not None:
            settings[name] = value
    for name in ("step_log", "data_plane_tls"):
        if (folder := getattr(args, name)) is not None:
            settings[name] = str(Path(folder).absolute())  # workers and gateways run elsewhere
    return settings


def _grpc_port(args: argparse.Namespace, front: Front) -> int | None:
    """None: there is no gRPC, which is told unless it was asked for."""
    if args.grpc_port == args.port:
        raise InvalidConfiguration(f"--port and --grpc-port are both {args.port}", param="grpc_port")
    port = choose_grpc_port(args.grpc_port, front, args.host)
    if port == args.port:
        port = None
    if port is None and args.grpc_port is None and args.host in EVERY_ADDRESS:
        report(f"port {DEFAULT_GRPC_PORT} is taken, so there is no gRPC: --grpc-port chooses another one")
    return port


def read_keys(path: Path) -> list[Any]:
    """The entries of a keys file; what is in them is checked with all other settings. Raises `InvalidConfiguration`."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfiguration(
            f"the keys in {path} cannot be read: {error.strerror}", param="api_keys_file"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise InvalidConfiguration(f"the keys in {path} are not YAML: {told}", param="api_keys_file") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidConfiguration(f"{path} must be a list of at least one key", param="api_keys_file")
    return entries
