"""An executor that computes nothing and takes a fixed time for each step: what is left to measure is the plumbing.

Where log probabilities are asked for it gives, in place of one, the time on the monotonic clock of this machine at
which the step ended, so that a client on the same machine can tell how long the token was on its way.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from planner.request import Request, TokenLogprobs
from planner.step import Chunk, ChunkOutput, Step, StepResult
from tests.fakes import fake_info
from worker.config import CPU_PREFILL_TOKENS, EngineConfig
from worker.executor import ProgramInfo
from worker.vocabulary import VocabularySource

STEP_S = 0.005
SLOW_STEP_S = 0.05
VOCAB_SIZE = 49_152  # SmolLM2's, whose tokenizer makes text of the tokens
FIRST_TOKEN, NUM_TOKENS = 300, 64


def make(config: EngineConfig, _: VocabularySource | None = None) -> SteppingExecutor:
    """The same call as `worker.program.build_executor`."""
    return SteppingExecutor(
        fake_info(
            name="stepping",
            vocab_size=VOCAB_SIZE,
            context=config.max_model_len or 8192,
            max_prefill_tokens=config.max_prefill_tokens or CPU_PREFILL_TOKENS,
            min_prefill_tokens=config.min_prefill_tokens,
            widths=config.decode_widths,
            num_cells=config.max_cells or 2**18,
            vector_size=None,
        )
    )


def make_slow(*settings: Any) -> SteppingExecutor:
    """The same with steps of `SLOW_STEP_S`, for many workers on few cores."""
    return SteppingExecutor(make(*settings).info, SLOW_STEP_S)


class SteppingExecutor:
    """A `worker.executor.Executor`. A step ends `step_s` seconds after its launch."""

    max_steps_in_flight = 1
    adapters = None

    def __init__(self, info: ProgramInfo, step_s: float = STEP_S) -> None:
        self.info = info
        self._step_s = step_s
        self._launched: deque[tuple[Step, float]] = deque()

    def prepare(self, request: Request) -> None:
        """Nothing is slow to make."""

    def launch(self, step: Step) -> None:
        self._launched.append((step, time.perf_counter() + self._step_s))

    def collect(self) -> StepResult:
        step, ends_at = self._launched.popleft()
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        ended_at = time.perf_counter()
        return StepResult([_output(chunk, ended_at) for chunk in step.chunks])

    def close(self) -> None:
        """Nothing is held."""


def _output(chunk: Chunk, ended_at: float) -> ChunkOutput:
    if not chunk.samples:
        return ChunkOutput()
    token = FIRST_TOKEN + (chunk.start + chunk.length) % NUM_TOKENS
    return ChunkOutput(token, None if chunk.sampling.logprobs is None else TokenLogprobs(token, ended_at))
