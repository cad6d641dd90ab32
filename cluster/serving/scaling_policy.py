"""How many workers there should be, by what they report: Serve's controller asks, with the reports of all of them.

Serve pickles a policy's module by value and runs it in its own process, so this one stands alone. Not for bounds and
delays, which Serve keeps, nor for what is reported: `cluster.worker` does that.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

CELL_USE = "raycomb_cell_use"
"""Cells that running sequences own and queued prompts will, over the pool's."""

SEAT_USE = "raycomb_seat_use"
"""Sequences that run and requests that wait, over the sequences that may run at once."""

QUEUE_S = "raycomb_queue_s"
"""Queued prompt tokens over the rate at which they are done, where it was measured."""

ROUNDING = 1e-6


class LoadPolicy:
    """As many workers as bring all of them to their target load.

    A worker's load is 1 where the fuller of its cells and its seats are at `target_use`, or its queue takes
    `target_queue_s` to prefill, whichever comes first. Requests that are open and cost nothing count for nothing.
    """

    def __init__(self, target_use: float, target_queue_s: float) -> None:
        self._targets = {CELL_USE: target_use, SEAT_USE: target_use, QUEUE_S: target_queue_s}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number wanted, and no state of ours. A worker that has not reported yet may be busy: until it has,
        nothing is taken away."""
        reports = context.aggregated_metrics or {}
        loads = {}
        for replica in context.running_replicas:
            if all(replica in reports.get(name, {}) for name in self._targets):
                loads[replica] = max(reports[name][replica] / target for name, target in self._targets.items())
        wanted = max(1, math.ceil(sum(loads.values()) - ROUNDING))
        if len(loads) < len(context.running_replicas) or not loads:
            wanted = max(wanted, context.target_num_replicas)
        return wanted, {}
