"""`raycomb doctor`: is everything there that a service needs? One line a check; exit code 1 if one failed.

With RAY_ADDRESS set it asks every node of that cluster, else this machine alone. It changes nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection

from cluster.ask import is_ready
from cluster.doctor_checks import Finding, findings
from cluster.front import DEFAULT_GRPC_PORT
from cluster.grpc_probe import is_serving
from cluster.node_facts import NodeFacts, node_facts
from cluster.serve_command import port_number
from planner.errors import SetupError

THIS_MACHINE = "this machine"
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a model that every node must be able to read")
    parser.add_argument("--port", type=port_number, default=8000, help="port for HTTP (default: 8000)")
    parser.add_argument(
        "--grpc-port", type=port_number, default=DEFAULT_GRPC_PORT, help=f"for gRPC (default: {DEFAULT_GRPC_PORT})"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes the cluster must have")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there must be")
    parser.add_argument("--url", help="a service that must be ready now, such as http://127.0.0.1:8000")
    parser.add_argument("--grpc-target", metavar="HOST:PORT", help="the same, for gRPC")


def execute(args: argparse.Namespace) -> int:
    """Raises `SetupError` when the cluster cannot be reached."""
    ports = (args.port, args.grpc_port)
    if os.environ.get("RAY_ADDRESS"):
        nodes = _facts_of_cluster(args.model, ports)
    else:
        nodes = {THIS_MACHINE: node_facts(args.model, ports)}
    found = findings(nodes, num_nodes=args.nodes, num_gpus=args.gpus, model=args.model)
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


def _facts_of_cluster(model: str | None, ports: Collection[int]) -> dict[str, NodeFacts | None]:
    """One small task on each live node; None for a node whose task failed or did not end in time."""
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
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(model, ports)] = node[
                    "NodeManagerAddress"
                ]
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
