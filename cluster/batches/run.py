"""One batch from its input file to its output files.

Every result is in the store before the next line is forgotten, so a run that ends at any moment leaves a batch that
another one goes on with; only lines that were under way are answered again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from cluster.answers.maker import AnswerMaker
from cluster.batches.desk import BatchDesk
from cluster.batches.input_file import check_batch_file, read_batch_lines
from cluster.batches.line import answer_line
from cluster.batches.store import Claimed
from cluster.errors import envelope, outcome
from cluster.headers import Terms
from cluster.models import Models
from cluster.routing.idle_room import IdleRoom
from planner.errors import DeadlineUnmeetable, QueueFull, RaycombError, Unavailable, UnknownModel, WorkerLost
from protos.openai_batches import Batch, BatchErrors, BatchLine

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 30.0
_LATER: Final = (QueueFull, DeadlineUnmeetable, Unavailable)
"""What says nothing against a line: it is sent again after a pause."""
MOST_LOSSES: Final = 3
"""A line that was given up so often, each time with all the workers that an answer may lose, may be what kills them."""


class BatchRun:
    """Owner: the task that holds the batch's lease. `rooms`: one for each model's lines. `clock` gives Unix time."""

    def __init__(
        self,
        models: Models,
        desk: BatchDesk,
        rooms: Mapping[AnswerMaker, IdleRoom],
        claimed: Claimed,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._desk = desk
        self._rooms = rooms
        self._batch = claimed.batch
        self._claimed = claimed
        self._clock = clock

    async def run(self) -> None:
        """Check the file, answer every line that has no result yet, and finish. May be cancelled at any moment."""
        if self._batch.status == "validating" and not await self._validate():
            return
        done = await self._desk.ask(lambda store: store.done(self._batch.id))
        lines = read_batch_lines(await self._input(), frozenset(done))
        async with asyncio.TaskGroup() as tasks:
            while (numbered := await asyncio.to_thread(next, lines, None)) is not None:
                maker = self._maker_of(numbered[1])
                room = self._rooms[maker]
                await room.enter()
                task = tasks.create_task(self._answer(maker, *numbered))
                task.add_done_callback(lambda _, room=room: room.leave())  # type: ignore[misc]
        await self._finish("completed")

    async def break_off(self, why: Literal["cancelled", "expired"]) -> None:
        """Finish as it stands: lines without a result get an error that says why."""
        if self._batch.request_counts.total or self._batch.status != "validating":
            done = await self._desk.ask(lambda store: store.done(self._batch.id))
            lines = read_batch_lines(await self._input(), frozenset(done))
            error = {"code": f"batch_{why}", "message": f"the batch was {why} before this line was answered"}
            while (numbered := await asyncio.to_thread(next, lines, None)) is not None:
                await self._put(*numbered, None, error=error)
        await self._finish(why)

    async def _validate(self) -> bool:
        path, most = await self._input(), self._models.first.service.settings.max_batch_lines
        total, errors = await asyncio.to_thread(check_batch_file, path, self._batch.endpoint, most)
        now = int(self._clock())

        def change(batch: Batch) -> Batch:
            if errors:
                return batch.model_copy(
                    update={"status": "failed", "failed_at": now, "errors": BatchErrors(data=errors)}
                )
            counts = batch.request_counts.model_copy(update={"total": total})
            begun = {"request_counts": counts, "in_progress_at": now}
            status = batch.status if batch.status == "cancelling" else "in_progress"
            return batch.model_copy(update=begun | {"status": status})

        self._batch = await self._desk.ask(lambda store: store.change(self._batch.id, change))
        return not errors

    def _maker_of(self, line: BatchLine) -> AnswerMaker:
        """That of its model; where there is no such one, any will say so."""
        asked = line.body.get("model")
        try:
            return self._models.of(asked if isinstance(asked, str) else None)
        except UnknownModel:
            return self._models.first

    async def _answer(self, maker: AnswerMaker, number: int, line: BatchLine) -> None:
        """Answer a line, however often it takes until a worker takes it."""
        pause_s, num_losses = FIRST_PAUSE_S, 0
        while True:
            try:
                terms = Terms(tenant=self._claimed.account)
                body = await answer_line(maker, self._batch.endpoint, line.body, terms)
                await self._put(number, line, (200, body))
                return
            except RaycombError as refusal:
                num_losses += isinstance(refusal, WorkerLost)
                if not isinstance(refusal, _LATER) and not 0 < num_losses < MOST_LOSSES:
                    await self._put(number, line, (outcome(refusal).status, envelope(refusal)))
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            except Exception:  # a net under what nobody foresaw, as every HTTP request has it
                logger.exception("line %d of %s failed", number, self._batch.id)
                await self._put(number, line, (500, envelope(RaycombError("the server failed"))))
                return

    async def _put(
        self,
        number: int,
        line: BatchLine,
        answered: tuple[int, dict[str, Any]] | None,
        error: dict[str, Any] | None = None,
    ) -> None:
        response = None
        if answered is not None:
            response = {"status_code": answered[0], "request_id": f"req_{uuid.uuid4().hex}", "body": answered[1]}
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        failed = answered is None or answered[0] != 200
        await self._desk.ask(lambda store: store.put_result(self._batch.id, number, record, failed=failed))

    async def _input(self) -> Path:
        account, file_id = self._claimed.account, self._batch.input_file_id
        return await self._desk.ask(lambda store: store.path(account, file_id))

    async def _finish(self, status: Literal["completed", "cancelled", "expired"]) -> None:
        await self._desk.ask(lambda store: store.finish(self._claimed.account, self._batch.id, status))
