"""A program: tells what is alive in a running service and in its Ray cluster, as long as somebody asks.

Run as `python -m benchmarks.cluster_state ADDRESS`, since Ray wants a process of its own. One line of JSON for each
line on its standard input: `gateways` (a `cluster.telemetry.activity.Activity` each), `workers` (a
`planner.limits.Snapshot` each), `actors` that are alive, `objects` in the object store and their `object_bytes`.
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

ANSWER_S = 20.0
GIVE_UP_AFTER_S = 90.0


@contextmanager
def cluster_state(ray_address: str) -> Iterator[AskedProgram]:
    with asked_program("benchmarks.cluster_state", ray_address) as program:
        yield program


def main() -> None:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address
    from ray._private.state import actors
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    handles = {
        "gateways": (serve.get_deployment_handle("Gateway", "raycomb"), "activity"),
        "workers": (serve.get_deployment_handle("Worker", "raycomb"), "snapshot"),
    }
    store = get_state_from_address(sys.argv[1])  # type: ignore[no-untyped-call]

    def ask(side: str) -> list[dict[str, Any]]:
        """A replica that is just being replaced fails the question, which is then put again."""
        handle, method = handles[side]
        deadline = time.monotonic() + GIVE_UP_AFTER_S
        while True:
            try:
                return [dataclasses.asdict(each) for each in handle.broadcast(method).results(timeout_s=ANSWER_S)]
            except (RayError, RayServeException, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    for _ in sys.stdin:
        told: dict[str, Any] = {side: ask(side) for side in handles}
        told["actors"] = sum(actor["State"] == "ALIVE" for actor in actors().values())
        stats = get_memory_info_reply(store).store_stats  # type: ignore[no-untyped-call]
        told |= {"objects": stats.num_local_objects, "object_bytes": stats.object_store_bytes_used}
        print(json.dumps(told), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
