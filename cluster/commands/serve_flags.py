"""The flags of `raycomb serve`, by what they are about. What they mean together is for `cluster.commands.serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from cluster.commands.argument_types import json_value, member_of, port_number, seconds
from cluster.commands.engine_flags import add_engine_flags
from cluster.serving.front import DEFAULT_GRPC_PORT, Front
from worker.tracing import Protocol


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "raycomb serve MODEL ... [--FLAG VALUE] ..."  # all flags by name would be a page
    _add_model(parser)
    _add_fleet(parser)
    _add_front(parser)
    _add_clients(parser)
    _add_adapters(parser)
    _add_data_plane(parser)
    _add_records(parser)
    add_engine_flags(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help="a folder with config.json, a .gguf file, a program, a hub id, or smollm2-135m; several: workers for each",
    )
    parser.add_argument("--models", type=json_value, help=argparse.SUPPRESS)  # what the file of --config lists
    parser.add_argument("--config", metavar="FILE", help="YAML with the same settings; flags and RAYCOMB_* beat it")
    parser.add_argument("--executor", help=argparse.SUPPRESS)
    parser.add_argument("--ask", metavar="QUESTION", help="ask this once ready, print the answer, and shut down")


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers and gateways")
    group.add_argument("--num-workers", type=int, metavar="N", help="replicas of each model (default: 1)")
    group.add_argument("--min-workers", type=int, metavar="N", help="with --max-workers: never fewer (default: 1)")
    group.add_argument("--max-workers", type=int, metavar="N", help="let their number follow the load, up to this")
    group.add_argument(
        "--num-gateways", type=int, metavar="N", default=1, help="processes that speak HTTP (default: 1)"
    )
    group.add_argument(
        "--drain-timeout-s",
        type=seconds,
        metavar="S",
        help="how long what runs may go on at an orderly end (default: 30)",
    )


def _add_front(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where clients come")
    group.add_argument("--host", metavar="ADDRESS", default="0.0.0.0", help="address to listen on (default: all)")
    group.add_argument(
        "--port", type=port_number, metavar="PORT", default=8000, help="port to listen on (default: 8000)"
    )
    group.add_argument(
        "--grpc-port",
        type=lambda text: 0 if text == "0" else port_number(text),
        metavar="PORT",
        help=f"port to listen on for gRPC; 0: none (default: {DEFAULT_GRPC_PORT} if nothing has it)",
    )
    group.add_argument(
        "--front",
        type=member_of(Front),
        choices=list(Front),
        default=Front.AUTO,
        help="what listens there: HAProxy, or Serve's own proxy in Python (default: HAProxy where it exists)",
    )


def _add_clients(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what clients may")
    group.add_argument(
        "--served-model-name", action="extend", nargs="+", metavar="NAME", help="what clients call the model"
    )
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that opens the service; may be repeated"
    )
    group.add_argument(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="YAML with hashes of keys, their tenants and limits; see `raycomb keys`",
    )
    group.add_argument(
        "--admin-key", action="append", metavar="KEY", help="a key that also opens what changes the service"
    )
    group.add_argument(
        "--batch-store",
        metavar="FOLDER",
        help="where files and batches of /v1/files and /v1/batches are kept; without it there are none",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        metavar="NAME=FOLDER",
        help="adapters to load at the start, by the name that clients use; needs --enable-lora",
    )
    group.add_argument(
        "--lora-folder", metavar="FOLDER", help="let an admin load adapters from below it while the service runs"
    )


def _add_data_plane(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("between gateways and workers")
    group.add_argument(
        "--data-plane-host",
        metavar="ADDRESS",
        help="where workers listen for gateways (default: the node's own address)",
    )
    group.add_argument(
        "--data-plane-tls",
        metavar="FOLDER",
        help="what `raycomb certs` made, on every node: TLS between gateways and workers",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is recorded")
    group.add_argument(
        "--step-log", metavar="FOLDER", help="each worker records its steps there, prompts' token ids included"
    )
    group.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log a line of JSON for each request, without prompts and answers, among Serve's logs (default: no)",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="a collector for traces, as http://localhost:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    )
    group.add_argument("--otlp-protocol", choices=get_args(Protocol), help="what it speaks (default: grpc)")
