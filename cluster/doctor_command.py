"""`raycomb doctor`: is everything there that a service needs? One line a check; exit code 1 if one failed.

With RAY_ADDRESS set it asks every node of that cluster, else this machine alone. It changes nothing, and can wait for
nodes that are still to join: `ray up` itself is content when the head runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.ask import is_ready
from cluster.doctor_checks import Finding, findings
from cluster.front import DEFAULT_GRPC_PORT
from cluster.grpc_probe import is_serving
from cluster.node_facts import NodeFacts, node_facts
from cluster.planned_nodes import PlannedNodes, planned_nodes
from cluster.serve_command import port_number
from planner.errors import SetupError

THIS_MACHINE = "this machine"
ANSWER_S = 60.0
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a model that every node must be able to read")
    parser.add_argument("--port", type=port_number, default=8000, help="port for HTTP (default: 8000)")
    parser.add_argument(
        "--grpc-port", type=port_number, default=DEFAULT_GRPC_PORT, help=f"for gRPC (default: {DEFAULT_GRPC_PORT})"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, metavar="N", help="how many nodes the cluster must have")
    size.add_argument("--cluster", type=Path, metavar="FILE", help="the file of `ray up` that says how many")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="how long nodes may take to join, in seconds (default: 0)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there must be")
    parser.add_argument("--url", help="a service that must be ready now, such as http://127.0.0.1:8000")
    parser.add_argument("--grpc-target", metavar="HOST:PORT", help="the same, for gRPC")


def execute(args: argparse.Namespace) -> int:
    """Raises `SetupError` when the cluster cannot be reached."""
    ports = (args.port, args.grpc_port)
    planned = PlannedNodes(args.nodes or 1) if args.cluster is None else planned_nodes(args.cluster)
    if os.environ.get("RAY_ADDRESS"):
        nodes = _facts_of_cluster(args.model, ports, planned.num_nodes, args.wait)
    else:
        nodes = {THIS_MACHINE: node_facts(args.model, ports)}
    found = findings(nodes, planned, num_gpus=args.gpus, model=args.model)
    if args.url is not None:
        found.append(_service("http", args.url, ready=is_ready(args.url)))
    if args.grpc_target is not None:
        found.append(_service("grpc", args.grpc_target, ready=is_serving(args.grpc_target)))
    for finding in found:
        print(finding)
    return 1 if any(finding.failed for finding in found) else 0


def _service(subject: str, where: str, *, ready: bool) -> Finding:
    if ready:
        return Finding(subject, f"{where} serves")
    return Finding(subject, f"{where} does not serve", "see `serve status`, and the logs of its gateways and workers")


def _facts_of_cluster(
    model: str | None, ports: Collection[int], num_nodes: int, wait_s: float
) -> dict[str, NodeFacts | None]:
    """One small task on each live node, once there are `num_nodes` or `wait_s` is over; None for a node whose task
    failed or did not end in time."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise SetupError(f"no Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}") from error
    try:
        task = ray.remote(node_facts)
        asked = {}
        for node_id, address in _live_nodes(num_nodes, wait_s).items():
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(model, ports)] = address
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        facts: dict[str, NodeFacts | None] = dict.fromkeys(asked.values())
        for answer in done:
            try:
                facts[asked[answer]] = ray.get(answer)
            except RayError:
                continue  # it stays without facts, and is told as silent
        return facts
    finally:
        ray.shutdown()


def _live_nodes(num_nodes: int, wait_s: float) -> dict[str, str]:
    """Addresses of live nodes by id: all that there are, as soon as they are `num_nodes`, or after `wait_s`."""
    import ray

    deadline, told = time.monotonic() + wait_s, 0
    while True:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        live = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        if len(live) >= num_nodes or time.monotonic() >= deadline:
            return live
        if len(live) != told:
            told = len(live)
            print(f"...  nodes: {told} of {num_nodes} so far; waiting up to {wait_s:.0f} s", flush=True)
        time.sleep(POLL_S)
