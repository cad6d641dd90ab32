"""`raycomb serve`: from flags to a running service and back to nothing. Free of Ray until the front is chosen."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from cluster.commands.engine_flags import add_engine_flags
from cluster.commands.serve_models import look_at, told_models
from cluster.config import ServiceConfig, service_config
from cluster.serving.front import (
    DEFAULT_GRPC_PORT,
    Front,
    check_port,
    choose_front,
    choose_grpc_port,
    front_environment,
)
from planner.errors import InvalidConfiguration
from worker.tls import channel_credentials, server_credentials
from worker.tracing import Protocol

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        help="a folder with config.json, a .gguf file, a program, a hub id, or smollm2-135m; several: workers for each",
    )
    parser.add_argument("--models", type=json.loads, help=argparse.SUPPRESS)  # what the file of --config lists
    parser.add_argument("--config", metavar="FILE", help="YAML with the same settings; flags and RAYCOMB_* beat it")
    parser.add_argument("--num-workers", type=int, metavar="N", help="replicas of each model (default: 1)")
    parser.add_argument("--min-workers", type=int, metavar="N", help="with --max-workers: never fewer (default: 1)")
    parser.add_argument("--max-workers", type=int, metavar="N", help="let their number follow the load, up to this")
    parser.add_argument("--num-gateways", type=int, default=1, help="processes that speak HTTP (default: 1)")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=port_number, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--grpc-port",
        type=lambda text: 0 if text == "0" else port_number(text),
        metavar="PORT",
        help=f"port to listen on for gRPC; 0: none (default: {DEFAULT_GRPC_PORT} if nothing has it)",
    )
    parser.add_argument(
        "--front",
        type=Front,
        choices=list(Front),
        default=Front.AUTO,
        help="what listens there: HAProxy, or Serve's own proxy in Python (default: HAProxy where it exists)",
    )
    parser.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="a name that clients use; may be repeated"
    )
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that opens the service; may be repeated"
    )
    parser.add_argument(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="YAML with hashes of keys, their tenants and limits; see `raycomb keys`",
    )
    parser.add_argument(
        "--batch-store",
        metavar="FOLDER",
        help="where files and batches of /v1/files and /v1/batches are kept; without it there are none",
    )
    parser.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        metavar="NAME=FOLDER",
        help="adapters to load at the start, by the name that clients use; needs --enable-lora",
    )
    parser.add_argument(
        "--lora-folder", metavar="FOLDER", help="let an admin load adapters from below it while the service runs"
    )
    parser.add_argument(
        "--admin-key", action="append", metavar="KEY", help="a key that also opens what changes the service"
    )
    parser.add_argument(
        "--data-plane-host",
        metavar="ADDRESS",
        help="where workers listen for gateways (default: the node's own address)",
    )
    parser.add_argument(
        "--data-plane-tls",
        metavar="FOLDER",
        help="what `raycomb certs` made, on every node: TLS between gateways and workers",
    )
    parser.add_argument(
        "--drain-timeout-s", type=float, help="how long what runs may go on at an orderly end (default: 30)"
    )
    parser.add_argument(
        "--step-log", metavar="FOLDER", help="each worker records its steps there, prompts' token ids included"
    )
    parser.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log a line of JSON for each request, without prompts and answers, among Serve's logs (default: no)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="a collector for traces, as http://localhost:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    )
    parser.add_argument("--otlp-protocol", choices=get_args(Protocol), help="what it speaks (default: grpc)")
    parser.add_argument("--executor", help=argparse.SUPPRESS)
    parser.add_argument("--ask", metavar="QUESTION", help="ask this once ready, print the answer, and shut down")
    add_engine_flags(parser)


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
    models = told_models(args)
    check_port(args.host, args.port)
    front = choose_front(args.front)
    grpc_port = choose_grpc_port(args.grpc_port, front, args.host)
    for model in models:
        look_at(model)
    settings = {
        "models": models,
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
    if args.data_plane_tls is not None:  # what a gateway or worker would fail over is told before Ray starts
        server_credentials(Path(args.data_plane_tls))
        channel_credentials(Path(args.data_plane_tls))
    return ServePlan(service_config(settings), args.host, args.port, grpc_port, front, args.ask)


def read_keys(path: Path) -> list[Any]:
    """The entries of a keys file; what is in them is checked with all other settings. Raises `InvalidConfiguration`."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfiguration(f"the keys in {path} cannot be read: {error}", param="api_keys_file") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidConfiguration(f"{path} must be a list of at least one key", param="api_keys_file")
    return entries


def port_number(text: str) -> int:
    """A port that can be listened on, for argparse."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports are 1 to 65535")
    return int(text)
