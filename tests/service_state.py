"""A program: tells what is alive in a running service, asked of every gateway and worker over Serve's own handles.

Run as `python -m tests.service_state ADDRESS` by a test, since Ray wants a process of its own. Prints one line of JSON
for each line on its standard input.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.asked_program import AskedProgram, asked_program

ANSWER_S = 60.0


class ServiceState:
    """The asking side: a process of this program that stays connected."""

    def __init__(self, program: AskedProgram) -> None:
        self._program = program

    def ask(self) -> dict[str, list[dict[str, Any]]]:
        """`gateways`: a `cluster.telemetry.activity.Activity` each, and `predictions`: a
        `cluster.routing.router.Predictions` each. `workers`: a `planner.limits.Snapshot` each. `agents`: where Ray's
        agent of each node exports metrics.
        """
        return self._program.ask()

    def wait_until_idle(self, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
        """The first state in which nothing runs, waits or is owned; after `timeout_s`, whatever there is."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.ask()
            busy = any(gateway["num_requests"] for gateway in state["gateways"])
            busy |= any(w["num_running"] or w["num_waiting"] or w["owned_cells"] for w in state["workers"])
            if not busy or time.monotonic() > deadline:
                return state


@contextmanager
def state_of(ray_address: str) -> Iterator[ServiceState]:
    with asked_program("tests.service_state", ray_address) as program:
        yield ServiceState(program)


def main() -> None:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    gateways = serve.get_deployment_handle("Gateway", "raycomb")
    workers = serve.get_deployment_handle("Worker", "raycomb")
    for _ in sys.stdin:
        asked = {
            "gateways": gateways.broadcast("activity"),
            "predictions": gateways.broadcast("predictions"),
            "workers": workers.broadcast("snapshot"),
        }
        agents = [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in ray.nodes()]
        told = {side: list(map(dataclasses.asdict, a.results(timeout_s=ANSWER_S))) for side, a in asked.items()}
        print(json.dumps(told | {"agents": [{"url": url} for url in agents]}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
