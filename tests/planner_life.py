"""A planner with a fake executor below it and a model beside it that knows no planner.

The model is the undisturbed run: a sequence's tokens depend on its seed and history alone, so whatever was batched,
chunked, shared, evicted, preempted or discarded, they must come out the same. The fake executor's pool remembers what
was written to each cell, so a wrong cell list is caught at the step that has it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from planner.errors import DeadlineExceeded, QueueFull, WorkerLost
from planner.limits import Limits
from planner.planner import Planner
from planner.request import FinishReason, Request, Update
from planner.slices import Method
from planner.step import Step
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_request

Key = tuple[int, int]


def new_life(script: Mapping[int, int] | None = None, **changes: Any) -> PlannerLife:
    """A life in a roomy pool; any limit may be replaced."""
    fields: dict[str, Any] = {
        "capacity": 256,
        "context": 128,
        "vocab_size": 100,
        "max_prefill_tokens": 16,
        "max_num_seqs": 4,
        "max_batched_tokens": 16,
        "prefill_chunk_tokens": 8,
    }
    return PlannerLife(Limits(**(fields | changes)), script)


class PlannerLife:
    """Drives a planner and checks, at every call, what must hold whatever happens."""

    def __init__(self, limits: Limits, script: Mapping[int, int] | None = None) -> None:
        """`script`: tokens that every sequence draws at these positions."""
        self.limits = limits
        self.script = script
        self.planner = Planner(limits)
        self.executor = self.new_executor()
        self.requests: dict[int, Request] = {}
        self.tokens: dict[Key, tuple[int, ...]] = defaultdict(tuple)
        self.prompt_logprobs: dict[Key, list[int]] = defaultdict(list)
        self.ended: dict[Key, FinishReason] = {}
        self.in_flight: deque[Step] = deque()
        self.failing: deque[frozenset[int]] = deque()
        self.num_refused = 0

    def new_executor(self) -> FakeExecutor:
        limits = self.limits
        info = fake_info(
            vocab_size=limits.vocab_size,
            context=limits.context,
            num_cells=limits.capacity,
            max_prefill_tokens=limits.max_prefill_tokens,
            min_prefill_tokens=limits.min_prefill_tokens,
            widths=limits.widths,
            swap_blocks=limits.swap_blocks,
            swap_block_cells=limits.swap_block_cells,
        )
        return FakeExecutor(info, max_steps_in_flight=limits.max_steps_in_flight, script=self.script)

    def submit(self, request: Request) -> int | None:
        """The request's id, or None where the queue was full."""
        before = self.planner.snapshot()
        num_queued = before.queued_prefill_tokens
        overfull = 0 < num_queued > self.limits.max_waiting_tokens - len(request.prompt)
        if overfull or before.num_waiting >= self.limits.max_waiting:
            with pytest.raises(QueueFull):
                self.planner.submit(request)
            self.num_refused += 1
            assert self.planner.snapshot() == before
            return None
        request_id = self.planner.submit(request)
        self.requests[request_id] = request
        return request_id

    def submit_prompts(self, *num_tokens: int, max_tokens: int = 2) -> None:
        """One request for each number, with a prompt of so many tokens of its own."""
        for first, length in enumerate(num_tokens):
            self.submit(fake_request([(50 + first + position) % 100 for position in range(length)], max_tokens))

    def cancel(self, request_id: int, indices: Collection[int] | None) -> None:
        num = self.requests[request_id].n
        chosen = range(num) if indices is None else indices
        expected = {(request_id, index) for index in chosen if index < num} - self.ended.keys()
        updates = self.planner.cancel(request_id, indices)
        assert {(update.request_id, update.index) for update in updates} == expected
        assert all(update.finish_reason is FinishReason.CANCELLED for update in updates)
        self.hear(updates)

    def expire(self, request_id: int) -> None:
        """As the engine does with a request that has run out of time."""
        expected = {(request_id, index) for index in range(self.requests[request_id].n)} - self.ended.keys()
        updates = self.planner.fail(request_id, DeadlineExceeded("out of time"))
        assert {(update.request_id, update.index) for update in updates} == expected
        assert all(update.finish_reason is FinishReason.FAILED for update in updates)
        assert all(isinstance(update.error, DeadlineExceeded) for update in updates)
        assert request_id not in self.planner.live
        self.hear(updates)

    def cancel_all(self) -> None:
        self.hear(self.planner.cancel_all())
        assert len(self.ended) == sum(request.n for request in self.requests.values())

    def lose_the_executor(self) -> None:
        updates = self.planner.fail_all(WorkerLost("the device is gone"))
        assert all(update.finish_reason is FinishReason.FAILED for update in updates)
        self.hear(updates)
        self.in_flight.clear()
        self.failing.clear()
        self.executor = self.new_executor()
        assert not self.planner.has_work
        assert self.planner.snapshot().free_cells == self.limits.capacity

    def check(self) -> None:
        """Cells are conserved, and nothing is left when nothing lives."""
        self.planner.check()
        state = self.planner.snapshot()
        assert state.free_cells + state.owned_cells + state.cached_cells == state.capacity
        assert state.num_running <= self.limits.max_num_seqs
        if not self.planner.has_work:
            assert state.owned_cells == state.num_running == state.num_waiting == state.queued_prefill_tokens == 0

    def finish(self) -> None:
        """Run to the end without further disturbance, and check all answers and counters."""
        for _ in range(2000):
            if not self.planner.has_work:
                break
            self.turn()
        assert not self.planner.has_work, "what was accepted does not end"
        self.check()
        self.check_answers()
        self.check_counters()

    def turn(self) -> None:
        step = self.launch(None)
        if self.in_flight and (step is None or len(self.in_flight) == self.limits.max_steps_in_flight):
            self.settle()
        else:
            assert self.in_flight or not self.planner.has_work, "work, and no step"

    def launch(self, failing_slice: int | None) -> Step | None:
        step = self.planner.plan()
        if step is None:
            return None
        self.check_step(step)
        failing = frozenset() if failing_slice is None else held_by(step, failing_slice)
        spoiled = frozenset().union(*self.failing) | failing
        self.executor.fail_forward(len(self.executor.steps), lambda chunk: chunk.sequence_id in spoiled)
        self.failing.append(failing)
        self.executor.launch(step)
        self.in_flight.append(step)
        return step

    def settle(self) -> list[Update]:
        self.failing.popleft()
        updates = self.planner.commit(self.in_flight.popleft(), self.executor.collect())
        self.hear(updates)
        return updates

    def step(self, failing_slice: int | None = None) -> tuple[Step, list[Update]]:
        """Plan and commit one step, with nothing else in flight."""
        assert not self.in_flight
        step = self.launch(failing_slice)
        assert step is not None
        return step, self.settle()

    def check_step(self, step: Step) -> None:
        limits = self.limits
        assert 0 < step.num_tokens <= limits.max_batched_tokens
        assert len(step.chunks) <= limits.max_num_seqs
        for piece in step.slices:
            if piece.method is Method.DECODE and piece.length > 1:
                assert all(chunk.length == 1 and chunk.samples for chunk in step.chunks)
        for chunk in step.chunks:
            assert not chunk.cells.flags.writeable
            if chunk.tokens is None:
                assert chunk.length == 1
                assert self.in_flight
                assert not chunk.sampling.needs_history
            reads_tokens = chunk.sampling.needs_history or chunk.sampling.grammar is not None
            assert (chunk.history is not None) == (chunk.samples and reads_tokens)
            if chunk.history is not None:
                num_unknown = 1 if chunk.tokens is None else 0
                assert len(chunk.history) == chunk.start + chunk.length - num_unknown

    def hear(self, updates: list[Update]) -> None:
        assert len({(update.request_id, update.index) for update in updates}) == len(updates)
        for update in updates:
            key = update.request_id, update.index
            request = self.requests[update.request_id]
            assert key not in self.ended, "news after the end"
            assert update.tokens or update.prompt_logprobs or update.finish_reason, "an update without news"
            assert 0 <= update.num_cached_tokens < len(request.prompt)
            assert (update.error is not None) == (update.finish_reason is FinishReason.FAILED)
            assert len(update.logprobs) == (0 if request.sampling.logprobs is None else len(update.tokens))
            self.tokens[key] += update.tokens
            self.prompt_logprobs[key] += [logprobs.token for logprobs in update.prompt_logprobs]
            if update.finish_reason is not None:
                self.ended[key] = update.finish_reason

    def check_answers(self) -> None:
        for request_id, request in self.requests.items():
            for index in range(request.n):
                key = request_id, index
                tokens = self.tokens[key]
                undisturbed = expected_tokens(request, index, vocab_size=self.limits.vocab_size, script=self.script)
                assert tokens == undisturbed[: len(tokens)], "a wrong token"
                told = self.prompt_logprobs[key]
                prompt = request.prompt.tolist() if request.prompt_logprobs and index == 0 else []
                assert told == prompt[: len(told)], "a prompt's log probabilities skipped or repeated"
                if self.ended[key] in (FinishReason.STOP, FinishReason.LENGTH):
                    assert len(tokens) == len(undisturbed)
                    assert len(told) == len(prompt)
                    stopped = bool(tokens) and tokens[-1] in request.stop_token_ids
                    stops = stopped and len(tokens) > request.min_tokens
                    assert self.ended[key] is (FinishReason.STOP if stops else FinishReason.LENGTH)

    def check_counters(self) -> None:
        metrics = self.planner.metrics
        assert metrics.num_requests_submitted == len(self.requests)
        assert metrics.num_requests_refused == self.num_refused
        assert metrics.num_sequences_accepted == metrics.finished.total() == len(self.ended)
        assert metrics.num_tokens_generated >= sum(map(len, self.tokens.values()))
        assert metrics.num_swapped_in <= metrics.num_swapped_out <= metrics.num_preemptions
        assert metrics.num_cells_swapped_in <= metrics.num_cells_swapped_out
        assert metrics.num_prefix_hits <= metrics.num_prefix_queries
        assert metrics.num_steps <= metrics.num_forwards.total() <= metrics.num_tokens.total()


def held_by(step: Step, failing_slice: int) -> frozenset[int]:
    """Sequences whose chunks one slice of the step holds, wholly or in part."""
    piece = step.slices[failing_slice % len(step.slices)]
    held, at = set(), 0
    for chunk in step.chunks:
        if at < piece.offset + piece.length and piece.offset < at + chunk.length:
            held.add(chunk.sequence_id)
        at += chunk.length
    return frozenset(held)
