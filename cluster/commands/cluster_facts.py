"""The facts of every node of a running Ray cluster, asked by a small task on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from cluster.commands.cluster_address import check_cluster_address, no_answer
from cluster.commands.node_facts import NodeFacts, node_facts

ANSWER_S: Final = 60.0
POLL_S: Final = 0.5


def facts_of_cluster(
    ray_address: str, model: str | None, ports: Collection[int], *, num_nodes: int, wait_s: float
) -> dict[str, NodeFacts | None]:
    """By address, once `num_nodes` are there or `wait_s` is over; None for a node whose task failed or did not end in
    time. `ray_address` is what RAY_ADDRESS may say. Raises `SetupError` when no cluster answers there."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check_cluster_address(ray_address)
    try:
        ray.init(ray_address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise no_answer(ray_address, error) from error
    try:
        task = ray.remote(_facts_here)
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


def _facts_here(model: str | None, ports: Collection[int]) -> NodeFacts:
    """Runs in a task of the cluster."""
    from cluster.access.shared_secret import secret_fingerprint

    return replace(node_facts(model, ports), secret=secret_fingerprint())


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
