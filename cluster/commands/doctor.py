"""`raycomb doctor`: is everything there that a service needs? One line a check; exit code 1 if one failed.

With RAY_ADDRESS set it asks every node of that cluster, else this machine alone. It changes nothing, and can wait for
nodes that are still to join and a service that is still to start: `ray up` itself is content when the head runs, and
`serve deploy` when it was understood.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from cluster.commands.argument_types import host_and_port, port_number, seconds, service_url
from cluster.commands.ask import is_ready
from cluster.commands.cluster_facts import facts_of_cluster
from cluster.commands.doctor_checks import Finding, findings
from cluster.commands.doctor_settings import keys_finding, metrics_finding, tls_finding, traces_finding
from cluster.commands.node_facts import node_facts
from cluster.commands.planned_nodes import PlannedNodes, planned_nodes
from cluster.commands.smoke import why_no_token
from cluster.rpc.probe import is_serving
from cluster.serving.front import DEFAULT_GRPC_PORT
from planner.errors import InvalidConfiguration
from worker.tracing import Protocol, check_endpoint

THIS_MACHINE = "this machine"
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model that every node must be able to read")
    parser.add_argument("--port", type=port_number, default=8000, metavar="PORT", help="for HTTP")
    parser.add_argument("--grpc-port", type=port_number, default=DEFAULT_GRPC_PORT, metavar="PORT", help="for gRPC")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, metavar="N", help="how many nodes the cluster must have")
    size.add_argument("--cluster", type=Path, metavar="FILE", help="the file of `ray up` that says how many")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there must be")
    parser.add_argument(
        "--url",
        type=service_url,
        metavar="URL",
        help="a service that must be ready and answer, such as http://127.0.0.1:8000",
    )
    parser.add_argument("--api-key", metavar="KEY", help="for that service, where it asks for one")
    parser.add_argument("--api-keys-file", type=Path, metavar="FILE", help="keys that a service is to be given")
    parser.add_argument("--data-plane-tls", type=Path, metavar="FOLDER", help="certificates of this machine, as served")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="a collector for traces that must take them")
    parser.add_argument("--otlp-protocol", choices=get_args(Protocol), default="grpc", help="what it speaks")
    parser.add_argument(
        "--grpc-target", type=host_and_port, metavar="HOST:PORT", help="one that must be ready for gRPC"
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=0.0,
        metavar="S",
        help="for how many seconds to wait for nodes, and then for the service (default: 0)",
    )


def execute(args: argparse.Namespace) -> int:
    """Raises `SetupError` when the cluster cannot be reached, or nodes are counted where there is none."""
    ports = (args.port, args.grpc_port)
    planned = PlannedNodes(args.nodes or 1) if args.cluster is None else planned_nodes(args.cluster)
    ray_address = os.environ.get("RAY_ADDRESS")
    if ray_address:
        nodes = facts_of_cluster(ray_address, args.model, ports, num_nodes=planned.num_nodes, wait_s=args.wait)
    elif planned.num_nodes > 1:
        raise InvalidConfiguration(
            f"{planned.num_nodes} nodes can be looked for in a cluster only: set RAY_ADDRESS (auto on one of its nodes)"
        )
    else:
        nodes = {THIS_MACHINE: node_facts(args.model, ports)}
    found = findings(nodes, planned, num_gpus=args.gpus, model=args.model)
    found += _told(args)
    deadline = time.monotonic() + args.wait
    if args.url is not None:
        found.append(_service("http", args.url, is_ready, deadline))
        if not found[-1].failed:
            found.append(_answer(args.url, args.api_key))
        if not found[-1].failed:
            found.append(metrics_finding(args.url))
    if args.grpc_target is not None:
        found.append(_service("grpc", args.grpc_target, is_serving, deadline))
    for finding in found:
        print(finding)
    return 1 if any(finding.failed for finding in found) else 0


def _told(args: argparse.Namespace) -> list[Finding]:
    """What a service would be told, looked at before it is."""
    found = []
    if args.api_keys_file is not None:
        found.append(keys_finding(args.api_keys_file))
    if args.data_plane_tls is not None:
        found.append(tls_finding(args.data_plane_tls, datetime.now(UTC)))
    if args.otlp_endpoint is not None:
        found.append(traces_finding(check_endpoint(args.otlp_endpoint), args.otlp_protocol))
    return found


def _service(subject: str, where: str, serves: Callable[[str], bool], deadline: float) -> Finding:
    """Ask until `deadline`, a time of the monotonic clock, and once at least."""
    while not serves(where):
        if time.monotonic() >= deadline:
            advice = "see `serve status`, and the logs of its gateways and workers"
            return Finding(subject, f"{where} does not serve", advice)
        time.sleep(POLL_S)
    return Finding(subject, f"{where} serves")


def _answer(url: str, api_key: str | None) -> Finding:
    fault = why_no_token(url, api_key)
    if fault is None:
        return Finding("answer", f"{url} generates")
    return Finding("answer", f"{url}: {fault}", "see the logs of its gateways and workers; --api-key gives a key")
