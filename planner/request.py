"""What a client asks a worker for, and what comes back: plain values, no behaviour but their own checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import InvalidRequest, RaycombError

TokenArray = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float32]
CellArray = npt.NDArray[np.int32]

MAX_TOP_LOGPROBS = 20
MAX_TENANT = 64

BASE_ROOT = 0
"""See `Request.root`: of requests without an adapter."""


class FinishReason(Enum):
    """Why a sequence ended. Each accepted sequence ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Pooling(Enum):
    """What of a prompt's hidden states, behind the last norm, becomes its one vector: the last one, or their mean."""

    LAST = "last"
    MEAN = "mean"


class Adapter(NamedTuple):
    """Low-rank matrices beside a model's own (LoRA): the name that clients use, and which matrices they are, as 64 bits
    of a hash of them. Keys and values that were computed with other matrices are of no use to it."""

    name: str
    revision: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; the defaults are OpenAI's.

    `seed` is any 64-bit value; a draw depends on (seed, position) only. `top_k` 0 is off. `logprobs` is the number of
    alternatives to report at each position (0: the chosen token alone; None: nothing). `grammar` is what the answer
    must follow, in the words of the library that the executor compiles it with; None: it is free. No answer has one of
    the `bad_words`, each given as its token ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-6, 100.0)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)
        if not all(self.bad_words):
            raise InvalidRequest("a word of bad_words has no token", param="bad_words")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Temperature 0: the arg max, lowest id first on ties, and no random draw."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a draw reads the tokens before it, so that it cannot run ahead of them."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.bad_words)

    @property
    def may_be_forced(self) -> bool:
        """Whether what a grammar leaves no choice in needs no draw: nobody wants log probabilities of it, and no bad
        word can end in it."""
        return self.grammar is not None and self.logprobs is None and not self.bad_words


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a prompt, and `n` sequences that share it.

    `prompt` int64[num_prompt]. `max_tokens` counts generated tokens of each sequence; 0 is allowed only together with
    `prompt_logprobs` or `pooling` (nothing is then sampled). `pooling` asks for a vector of the prompt and for nothing
    else: `n` is 1 and `max_tokens` 0. `stop_token_ids` end a sequence and are delivered; they are masked
    until `min_tokens` tokens were generated. Lower `priority` runs first.

    A request may continue a sequence that ran elsewhere: the last `num_generated` tokens of the prompt are then that
    sequence's own, for penalties to count as such. It goes before new requests of its priority. `max_tokens` and
    `min_tokens` count what is still to come, and `sampling.seed` is that of the sequence.

    Within a priority, tenants share a worker by their weights. `deadline` is a time on `time.monotonic`'s clock of
    the process that holds the request; the planner does not read it, since it has no clock. Nor does it read `trace`,
    the W3C traceparent of the span that those of this request stand under; empty: it has none.

    `adapter`: what is computed beside the model's own matrices; None: nothing.
    """

    prompt: TokenArray
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    priority: int = 0
    prompt_logprobs: bool = False
    pooling: Pooling | None = None
    num_generated: int = 0
    tenant: str = ""
    deadline: float | None = None
    trace: str = ""
    adapter: Adapter | None = None

    @property
    def root(self) -> int:
        """The name of the empty prefix that the prompt grows from: prefixes are shared below one root only."""
        return BASE_ROOT if self.adapter is None else self.adapter.revision

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or self.prompt.dtype.kind not in "iu":
            raise InvalidRequest("the prompt must be one list of token ids, all integers", param="prompt")
        if len(self.prompt) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if self.pooling is not None and (self.max_tokens > 0 or self.n > 1 or self.prompt_logprobs):
            raise InvalidRequest("a request for a vector has max_tokens = 0, n = 1 and nothing else", param="pooling")
        says_nothing = self.prompt_logprobs or self.pooling is not None
        _in_range("max_tokens", self.max_tokens, 0 if says_nothing else 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("n", self.n, 1, 2**16)
        _in_range("priority", self.priority, -(2**31), 2**31 - 1)
        _in_range("num_generated", self.num_generated, 0, len(self.prompt) - 1)
        if len(self.tenant) > MAX_TENANT:
            raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT} characters", param="tenant")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the token's own, and the most likely alternatives, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Update(NamedTuple):
    """News of one sequence after one step. The last one of a sequence, and only it, has a `finish_reason`.

    `vector` float32[hidden size], as plain numbers: with the last one of a sequence that was to be pooled; else empty.
    """

    request_id: int
    index: int  # type: ignore[assignment]  # a tuple's own method of that name is nothing to an update
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: RaycombError | None = None
    vector: tuple[float, ...] = ()


def sequence_seed(seed: int, index: int) -> int:
    """Seed of the index-th sequence of a request: its own stream, and index 0 draws what n=1 would.

    The increment is the golden-ratio constant of splitmix64 (Steele, Lea, Flood 2014).
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must lie in [{low}, {high}], not {value}", param=name)
