"""The runs that a gateway has at one worker: sent, told of what the worker says, cancelled, asked back, or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from opentelemetry.trace import Tracer

from cluster.routing.backlog import Backlog
from cluster.routing.cancel_watch import CancelWatch
from cluster.routing.live_runs import LiveRuns
from cluster.routing.outbox import Outbox
from cluster.routing.prompt_scores import PromptScores
from cluster.routing.run import Run
from cluster.routing.stream_listeners import RunKeeper, StreamObserver
from cluster.telemetry.run_spans import CANCELLED, ENDED, MOVED, RunEnd, RunSpans, lost, refused
from planner.errors import RaycombError, RequestRefused, WorkerLost
from protos import worker_pb2 as pb
from worker.distribution import Histogram
from worker.wire import request_to_proto, update_from_proto


class SentRuns:
    """Demultiplexes a worker's updates to the runs that they are for. Owner: the worker's stream, on the gateway's
    event loop.

    `outbox`: what is to be written to the worker; a new one after each `lose_all`. `left` is called whenever a run is
    here no more.
    """

    def __init__(
        self,
        worker_id: str,
        observer: StreamObserver,
        keeper: RunKeeper,
        free: Histogram,
        tracer: Tracer,
        left: Callable[[], None],
    ) -> None:
        self.outbox = Outbox()
        self.backlog = Backlog()
        self._worker_id = worker_id
        self._observer = observer
        self._keeper = keeper
        self._left = left
        self._cancels = CancelWatch(free)
        self._spans = RunSpans(tracer, worker_id)
        self._live = LiveRuns(lambda request_id: self._cancel(request_id, None))
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, request_id: int, run: Run) -> None:
        """Send a run. Raises `QueueFull` or `InvalidRequest`; nothing has then been sent."""
        trace = self._spans.start(request_id, run)
        request = replace(run.request, trace=trace) if trace else run.request
        try:
            self.outbox.submit(request_to_proto(request_id, request))
        except RaycombError as why_not:
            self._spans.end(request_id, refused(why_not))
            raise
        self._cancels.sent(request_id, run.request.n)
        self._live.add(request_id, run)
        if run.request.adapter is None and not run.was_accepted:  # others may lack it; nobody moves twice
            self.backlog.sent(request_id)
        run.start(lambda indices: self._cancel(request_id, indices))

    def recall(self, count: int) -> int:
        """Ask the last `count` of the backlog back, or all; how many. The worker gives those that have not begun."""
        newest = self.backlog.recall(count)
        for request_id in newest:
            self.outbox.recall(request_id)
        return len(newest)

    def deliver(self, updates: Iterable[pb.SequenceUpdate], scores: PromptScores) -> None:
        """What one message of the worker says of runs. `scores`: what was read of it already."""
        losses: dict[int, tuple[Run, WorkerLost]] = {}
        for place, entry in enumerate(updates):
            num_cached = entry.num_cached_tokens if entry.tokens else None
            if entry.finish_reason:
                is_refusal = entry.finish_reason == pb.FINISH_REASON_REFUSED
                self._cancels.ended(entry.request_id, self._loop.time(), whole=is_refusal)
            self._observer.settle(self._worker_id, entry.request_id, num_cached)
            run = self._live.get(entry.request_id)
            if run is None:
                continue  # cancelled here; the worker's last words for it are on their way
            update = update_from_proto(entry, scores.get(place))
            if isinstance(update, RequestRefused):
                self._take_back(entry.request_id, run, update)
                continue
            self.backlog.heard_of(entry.request_id)
            run.deliver(update)
            if run.loss is not None:
                losses[entry.request_id] = run, run.loss
            elif run.over:
                self._forget(entry.request_id, ENDED)
        for request_id, (run, loss) in losses.items():
            self._spans.end(request_id, lost(loss))
            self._cancel(request_id, None)
            self._keeper.lost([run], loss)

    def lose_all(self, error: WorkerLost) -> None:
        """The worker has none of them any more."""
        self.outbox = Outbox()
        orphans = self._live.runs
        for request_id in self._live.ids:
            self._forget(request_id, lost(error))
        if orphans:
            self._keeper.lost(orphans, error)
        self._cancels.clear()

    def _take_back(self, request_id: int, run: Run, refusal: RequestRefused) -> None:
        if self.backlog.was_recalled(request_id):
            self._forget(request_id, MOVED)
            self._keeper.recalled(run)
        else:
            self._forget(request_id, refused(refusal))
            self._keeper.refused(run, self._worker_id, refusal)

    def _cancel(self, request_id: int, indices: Collection[int] | None) -> None:
        if request_id not in self._live:
            return
        is_heard = self.outbox.cancel(request_id, indices)
        if not is_heard:
            self._cancels.never_sent(request_id)
        if indices is None:
            self._cancels.cancelled(request_id, self._loop.time())
            self._forget(request_id, CANCELLED)

    def _forget(self, request_id: int, end: RunEnd) -> None:
        self._spans.end(request_id, end)
        self._observer.settle(self._worker_id, request_id)
        self.backlog.forget(request_id)
        self._live.remove(request_id)
        self._left()
