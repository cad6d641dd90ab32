"""What a worker last said of itself over its stream, put together from messages that each tell a part."""

from __future__ import annotations

from cluster.routing.fleet import WorkerReport
from cluster.routing.router import WorkerInfo
from protos import worker_pb2 as pb
from worker.totals import Totals
from worker.wire import snapshot_from_proto
from worker.wire_totals import totals_from_proto


class LastReport:
    """Owner: the stream. `value` is None until the worker has told of its state, and after `clear`."""

    def __init__(self) -> None:
        self.value: WorkerReport | None = None
        self._info: WorkerInfo | None = None
        self._totals = Totals()

    def introduce(self, info: pb.WorkerInfo) -> WorkerInfo:
        """The worker's first word."""
        self._info = WorkerInfo(
            worker_id=info.worker_id,
            model=info.model,
            vocab_size=info.vocab_size,
            context=info.context,
            num_cells=info.num_cells,
            max_prefill_tokens=info.max_prefill_tokens,
            max_num_seqs=info.max_num_seqs,
            vector_size=info.vector_size if info.HasField("vector_size") else None,
        )
        return self._info

    def take(self, message: pb.StepUpdates) -> None:
        """Take in a message that has a snapshot."""
        if message.HasField("totals"):
            self._totals = totals_from_proto(message.totals)
        if self._info is not None:
            snapshot = snapshot_from_proto(message.snapshot)
            self.value = WorkerReport(self._info, snapshot, message.snapshot.draining, self._totals)

    def clear(self) -> None:
        """The stream broke: nothing is known of the worker."""
        self.value, self._info, self._totals = None, None, Totals()
