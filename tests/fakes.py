"""A scriptable executor without a model: the first-class fake of the one seam below the engine.

Tokens are a pure function of (seed, position, adapter, all tokens before), so every disturbance of batching, chunking,
caching or preemption must leave them as they are. A fake pool remembers what was written to each cell, so that a wrong
cell list is caught at the step that was given it. Free of torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import ForwardFailed, RequestFailed
from planner.limits import Limits
from planner.request import BASE_ROOT, Pooling, Request, SamplingParams, TokenLogprobs, Vector, sequence_seed
from planner.slices import Method
from planner.step import Chunk, ChunkOutput, Step, StepResult
from tests.fake_pool import NO_HISTORY, FakePool, WrongStepError, next_hash
from tests.fake_slots import FakeSlots
from tests.turns import limits_of
from worker.config import CPU_PREFILL_TOKENS, EngineConfig
from worker.executor import ProgramInfo
from worker.vocabulary import VocabularySource

Outcomes = list[ChunkOutput | RequestFailed]


def fake_info(**changes: Any) -> ProgramInfo:
    """A small program; any field may be replaced."""
    fields: dict[str, Any] = {
        "name": "fake",
        "architecture": "FakeForCausalLM",
        "vocab_size": 1000,
        "context": 1024,
        "max_prefill_tokens": 64,
        "min_prefill_tokens": 2,
        "widths": (1, 2, 4, 8, 16),
        "num_cells": 4096,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "dtype": "float32",
        "device": "cpu",
        "bytes_per_cell": 8,
        "vector_size": 3,
    }
    return ProgramInfo(**(fields | changes))


def fake_limits(info: ProgramInfo, **changes: Any) -> Limits:
    """Limits that follow the program; any field may be replaced."""
    fields = {"max_num_seqs": 16, "max_batched_tokens": 64, "prefill_chunk_tokens": 32}
    return limits_of(info, **(fields | changes))


def fake_request(prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **changes: Any) -> Request:
    return Request(prompt=np.array(prompt, dtype=np.int64), max_tokens=max_tokens, **changes)


def fake_token(
    sampling: SamplingParams, position: int, history: int, vocab_size: int, masked: frozenset[int] = frozenset()
) -> int:
    """The token drawn for `position` after a history with this hash. Greedy draws do not read the seed."""
    seed = 0 if sampling.greedy else sampling.seed
    token = next_hash(history ^ seed, position) % vocab_size
    while token in masked:
        token = (token + 1) % vocab_size
    return token


def expected_tokens(
    request: Request, index: int = 0, *, vocab_size: int = 1000, script: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """What the index-th sequence of `request` must generate when nothing ends it early. `script` as the executor's."""
    sampling = request.sampling
    seed = sequence_seed(sampling.seed, index)
    history = NO_HISTORY ^ request.root
    for token in request.prompt.tolist():
        history = next_hash(history, token)
    generated: list[int] = []
    while len(generated) < request.max_tokens:
        position = len(request.prompt) + len(generated)
        masked = request.stop_token_ids if len(generated) < request.min_tokens else frozenset()
        token = (script or {}).get(position)
        if token is None:
            token = fake_token(SamplingParams(sampling.temperature, seed=seed), position, history, vocab_size, masked)
        generated.append(token)
        history = next_hash(history, token)
        if token in request.stop_token_ids:
            break
    return tuple(generated)


@dataclass(frozen=True, slots=True)
class _Launched:
    outcomes: Outcomes
    death: BaseException | None
    ready_at: float


class FakeExecutor:
    """An `Executor` that can be held, failed, killed and made to answer wrongly at chosen steps.

    Steps are counted from 0 in the order of their launch. `script` maps an absolute position to the token that every
    sequence draws there. Scripting methods may be called on any thread, before the step that they are about.
    """

    def __init__(
        self,
        info: ProgramInfo | None = None,
        *,
        step_time_s: float = 0.0,
        max_steps_in_flight: int = 1,
        script: Mapping[int, int] | None = None,
        keeps_record: bool = True,
        num_slots: int = 0,
    ) -> None:
        """`keeps_record`: False for a long life; `steps`, `prepared` and `emitted_at` then stay empty."""
        self._info = info or fake_info()
        self._keeps_record = keeps_record
        self._depth = max_steps_in_flight
        self._step_time_s = step_time_s
        self._script = dict(script or {})
        self._slots = FakeSlots(num_slots) if num_slots else None
        self._pool = FakePool(self._info.num_cells)
        self._host = FakePool(self._info.swap_blocks * self._info.swap_block_cells)
        self._last_token: dict[int, int] = {}
        self._launched: deque[_Launched] = deque()
        self._free_at = 0.0
        self._failing: dict[int, Callable[[Chunk], bool]] = {}
        self._deaths: dict[int, BaseException] = {}
        self._wrong: dict[int, Callable[[Outcomes], Outcomes]] = {}
        self._condition = threading.Condition()
        self._permits: int | None = None
        self._num_launched = 0
        self.num_beats = 0
        self.prepared: list[Request] = []
        self.steps: list[Step] = []
        self.emitted_at: list[float] = []
        self.closed = False

    @property
    def info(self) -> ProgramInfo:
        return self._info

    @property
    def max_steps_in_flight(self) -> int:
        return self._depth

    @property
    def adapters(self) -> FakeSlots | None:
        return self._slots

    # The script.

    def give_slots(self, num_slots: int) -> None:
        """Before its engine is made."""
        self._slots = FakeSlots(num_slots)

    def hold(self) -> None:
        """Let no step finish until released."""
        with self._condition:
            self._permits = 0

    def release(self, num_steps: int | None = None) -> None:
        """Let `num_steps` more steps finish, or all from now on."""
        with self._condition:
            self._permits = None if num_steps is None or self._permits is None else self._permits + num_steps
            self._condition.notify_all()

    def wait_launched(self, num_steps: int, timeout_s: float = 10.0) -> None:
        """Block until that many steps were launched in all."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_launched >= num_steps, timeout_s):
                raise TimeoutError(f"{self._num_launched} of {num_steps} steps launched within {timeout_s} s")

    def beat(self) -> None:
        """Show that the step gets on, though it does not finish."""
        self.num_beats += 1

    def fail_forward(self, at_step: int, held: Callable[[Chunk], bool] = lambda _: True) -> None:
        """The forward that held these chunks fails."""
        self._failing[at_step] = held

    def die(self, at_step: int, error: BaseException) -> None:
        """`collect` of that step raises."""
        self._deaths[at_step] = error

    def answer_wrongly(self, at_step: int, change: Callable[[Outcomes], Outcomes]) -> None:
        """`change` makes the outcomes of that step."""
        self._wrong[at_step] = change

    # The seam.

    def prepare(self, request: Request) -> None:
        if self._keeps_record:
            self.prepared.append(request)

    def launch(self, step: Step) -> None:
        assert not self.closed, "launched after close"
        if len(self._launched) >= self._depth:
            raise WrongStepError(f"{len(self._launched)} steps are in flight already")
        self._check(step)
        number = self._num_launched
        if self._keeps_record:
            self.steps.append(step)
        for sequence_id in step.dropped:
            self._last_token.pop(sequence_id, None)
        self._swap(step)
        failing = self._failing.get(number, _no_chunk)
        outcomes: Outcomes = [self._fail(chunk) if failing(chunk) else self._run(chunk) for chunk in step.chunks]
        if number in self._wrong:
            outcomes = self._wrong[number](outcomes)
        self._free_at = max(self._free_at, time.monotonic()) + self._step_time_s
        self._launched.append(_Launched(outcomes, self._deaths.get(number), self._free_at))
        with self._condition:
            self._num_launched += 1
            self._condition.notify_all()

    def collect(self) -> StepResult:
        with self._condition:
            self._condition.wait_for(lambda: self._permits is None or self._permits > 0)
            if self._permits is not None:
                self._permits -= 1
        oldest = self._launched.popleft()
        time.sleep(max(0.0, oldest.ready_at - time.monotonic()))
        if oldest.death is not None:
            raise oldest.death
        if self._keeps_record:
            self.emitted_at.append(time.monotonic())
        return StepResult(oldest.outcomes)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    def _swap(self, step: Step) -> None:
        for swap in step.swaps_out:
            places = self._host_places(swap.blocks)
            self._host.spoil(places)
            self._host.copy(places[: len(swap.cells)], self._pool, swap.cells)
        for back in step.swaps_in:
            self._pool.copy(back.cells, self._host, self._host_places(back.blocks))

    def _host_places(self, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        size = self._info.swap_block_cells
        return (blocks[:, None] * size + np.arange(size)).ravel()

    def _run(self, chunk: Chunk) -> ChunkOutput:
        tokens = [self._last_token[chunk.sequence_id]] if chunk.tokens is None else chunk.tokens.tolist()
        root = BASE_ROOT if chunk.adapter is None else chunk.adapter.revision
        if self._slots is not None and chunk.adapter not in (None, *self._slots.held.values()):
            raise WrongStepError(f"a chunk wants {chunk.adapter}, and the slots hold {self._slots.held}")
        history = self._pool.history(chunk.cells[: chunk.start], root)
        if chunk.history is not None and chunk.tokens is not None:
            self._check_history(chunk, history)
        history = self._pool.write(chunk.cells, chunk.start, history, tokens)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if chunk.prompt_targets is not None:
            prompt_logprobs = tuple(_logprobs(token, chunk.sampling) for token in chunk.prompt_targets.tolist())
        if not chunk.samples:
            return ChunkOutput(prompt_logprobs=prompt_logprobs, pooled=_pooled(chunk))
        position = chunk.start + chunk.length
        token = self._last_token[chunk.sequence_id] = self._draw(chunk, position, history)
        logprobs = None if chunk.sampling.logprobs is None else _logprobs(token, chunk.sampling)
        forced = self._forced(chunk, position, next_hash(history, token))
        return ChunkOutput(token, logprobs, prompt_logprobs, forced=forced)

    def _draw(self, chunk: Chunk, position: int, history: int) -> int:
        token = self._script.get(position)
        if token is None:
            token = fake_token(chunk.sampling, position, history, self._info.vocab_size, chunk.masked)
        return token

    def _forced(self, chunk: Chunk, position: int, history: int) -> tuple[int, ...]:
        """What would be drawn next anyway, as if a grammar left no choice: so many tokens at most as its text says,
        where that is a number."""
        sampling = chunk.sampling
        grammar = sampling.grammar or ""
        if not grammar.isdecimal() or not sampling.may_be_forced or chunk.masked:
            return ()
        forced: list[int] = []
        for follower in range(history % (int(grammar) + 1)):
            forced.append(self._draw(chunk, position + 1 + follower, history))
            history = next_hash(history, forced[-1])
        return tuple(forced)

    def _fail(self, chunk: Chunk) -> ForwardFailed:
        self._pool.spoil(chunk.cells[chunk.start :])
        return ForwardFailed("the fake forward failed, as it was told to")

    def _check(self, step: Step) -> None:
        """The slices tile the packed axis in widths that the program has, and no two rows write to one cell."""
        info, end = self._info, 0
        for piece in step.slices:
            low, high = (
                (1, info.widths[-1])
                if piece.method is Method.DECODE
                else (info.min_prefill_tokens, info.max_prefill_tokens)
            )
            if piece.offset != end or not low <= piece.length <= high:
                raise WrongStepError(f"{piece} after {end} tokens; its length must lie in [{low}, {high}]")
            end += piece.length
        if end != step.num_tokens:
            raise WrongStepError(f"slices cover {end} of {step.num_tokens} tokens")
        sequences = [chunk.sequence_id for chunk in step.chunks]
        if len(set(sequences)) != len(sequences):
            raise WrongStepError("a sequence has two chunks in one step")
        written = np.concatenate([chunk.cells[chunk.start :] for chunk in step.chunks])
        if len(written) != step.num_tokens or len(np.unique(written)) != len(written):
            raise WrongStepError("two rows of one step write to the same cell")

    @staticmethod
    def _check_history(chunk: Chunk, history: int) -> None:
        assert chunk.history is not None
        told = NO_HISTORY ^ (BASE_ROOT if chunk.adapter is None else chunk.adapter.revision)
        for token in chunk.history[: chunk.start].tolist():
            told = next_hash(told, token)
        if told != history:
            raise WrongStepError("the history of a chunk is not what its cells hold")


def make_fake_executor(config: EngineConfig, _: VocabularySource | None = None) -> FakeExecutor:
    """A fake with the sizes of a configuration; the same call as `worker.program.build_executor`."""
    return FakeExecutor(
        fake_info(
            context=config.max_model_len or 1024,
            num_cells=config.max_cells or 65_536,
            max_prefill_tokens=config.max_prefill_tokens or CPU_PREFILL_TOKENS,
            min_prefill_tokens=config.min_prefill_tokens,
            widths=config.decode_widths,
        ),
        num_slots=config.max_loras if config.enable_lora else 0,
    )


def _no_chunk(_: Chunk) -> bool:
    return False


def _pooled(chunk: Chunk) -> Vector | None:
    """As if a row's hidden state were its token, its position and 1."""
    if chunk.pooling is None or chunk.tokens is None:
        return None
    positions = np.arange(chunk.start, chunk.start + chunk.length)
    rows = np.stack([chunk.tokens, positions, np.ones(chunk.length)], axis=1).astype(np.float32)
    pooled: Vector = rows[-1] if chunk.pooling is Pooling.LAST else rows.sum(axis=0)
    return pooled


def _logprobs(token: int, sampling: SamplingParams) -> TokenLogprobs:
    """-1 for the token itself, and -1, -2, ... for it and its neighbours as the alternatives."""
    top = tuple((token + rank, -1.0 - rank) for rank in range(sampling.logprobs or 0))
    return TokenLogprobs(token, -1.0, top)
