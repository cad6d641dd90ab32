"""What two workers might say of themselves: a busy one, and one that drains."""

from __future__ import annotations

from cluster.routing.fleet import WorkerReport
from cluster.routing.router import WorkerInfo
from planner.limits import Snapshot
from planner.request import FinishReason
from worker.distribution import Histogram
from worker.stats import StepKind
from worker.totals import STEP_BOUNDS_S, Totals


def reports() -> tuple[WorkerReport, WorkerReport]:
    step = Histogram(STEP_BOUNDS_S)
    step.observe(0.003)
    busy = Totals(
        prefix_queries=10,
        prefix_hits=4,
        decode_forwards={1: 3, 8: 2},
        padded_rows=5,
        finished={FinishReason.STOP: 6},
        step_time={StepKind.DECODE: step.distribution},
    )
    infos = [WorkerInfo(name, "tiny", 100, 64, 100, 8, 4) for name in ("w1", "w2")]
    return (
        WorkerReport(infos[0], Snapshot(100, 50, 25, 25, 3, 1, 70, 9), draining=False, totals=busy),
        WorkerReport(infos[1], Snapshot(100, 100, 0, 0, 0, 0, 0, 0), draining=True, totals=Totals()),
    )


def reports_of(num_seqs: int, num_running: int = 0, num_waiting: int = 0) -> tuple[WorkerReport]:
    """One worker that takes `num_seqs` sequences at once."""
    info = WorkerInfo("w1", "tiny", 100, 64, 100, 8, num_seqs)
    snapshot = Snapshot(100, 100, 0, 0, num_running, num_waiting, 0, 0)
    return (WorkerReport(info, snapshot, draining=False, totals=Totals()),)
