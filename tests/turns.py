"""A planner over an executor, turned by hand: what a worker's loop does, without its thread, inbox and clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from planner.limits import Limits
from planner.planner import Planner
from planner.request import Request, Update
from planner.step import Step
from worker.executor import Executor, ProgramInfo

MOST_STEPS: Final = 1000
E = TypeVar("E", bound=Executor)


def limits_of(info: ProgramInfo, **changes: Any) -> Limits:
    """Limits that follow the program; any field may be replaced."""
    fields: dict[str, Any] = {
        "capacity": info.num_cells,
        "context": info.context,
        "vocab_size": info.vocab_size,
        "max_prefill_tokens": info.max_prefill_tokens,
        "min_prefill_tokens": info.min_prefill_tokens,
        "widths": info.widths,
        "swap_blocks": info.swap_blocks,
        "swap_block_cells": info.swap_block_cells,
        "pools": info.vector_size is not None,
    }
    return Limits(**(fields | changes))


def tokens_of(updates: Sequence[Update], index: int = 0) -> list[int]:
    """Of a request's sequence `index`, all that these updates tell."""
    return [token for update in updates if update.index == index for token in update.tokens]


class Turns(Generic[E]):
    """As many steps are in flight as the limits allow. `steps`: the last `MOST_STEPS` that were launched."""

    def __init__(self, limits: Limits, executor: E, *, checked: bool = True) -> None:
        """`checked`: the planner's invariants are verified after every commit, in O(capacity)."""
        self.planner = Planner(limits)
        self.executor = executor
        self.steps: deque[Step] = deque(maxlen=MOST_STEPS)
        self._checked = checked
        self._in_flight: deque[Step] = deque()

    def turn(self) -> list[Update]:
        """Launch a step if there is one, and settle the oldest when no more may be in flight, or nothing was to do."""
        step = self.planner.plan()
        if step is not None:
            self.executor.launch(step)
            self.steps.append(step)
            self._in_flight.append(step)
        assert self._in_flight or not self.planner.has_work, "work, and no step"
        if not self._in_flight or (step is not None and len(self._in_flight) < self.planner.limits.max_steps_in_flight):
            return []
        updates = self.planner.commit(self._in_flight.popleft(), self.executor.collect())
        if self._checked:
            self.planner.check()
        return updates

    def run(self) -> list[Update]:
        """To the end of all that was submitted."""
        updates: list[Update] = []
        while self.planner.has_work:
            updates += self.turn()
        return updates

    def updates(self, requests: Sequence[Request]) -> list[list[Update]]:
        """Run all together; for each request its updates."""
        by_id: dict[int, list[Update]] = {self.planner.submit(request): [] for request in requests}
        for update in self.run():
            by_id[update.request_id].append(update)
        return list(by_id.values())

    def answer(self, requests: Sequence[Request]) -> list[list[list[int]]]:
        """Run all together; for each request the tokens of each of its sequences. None of them may fail."""
        answers: list[list[list[int]]] = [[[] for _ in range(request.n)] for request in requests]
        for tokens, news in zip(answers, self.updates(requests), strict=True):
            for update in news:
                assert update.error is None, update.error
                tokens[update.index].extend(update.tokens)
        return answers

    def answer_alone(self, requests: Sequence[Request]) -> list[list[list[int]]]:
        return [self.answer([request])[0] for request in requests]
