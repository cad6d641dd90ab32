"""What `raycomb bench online` sends: prompts of several kinds, all seeded, and when each of them is sent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cluster.bench.workload import check_positive
from planner.errors import InvalidConfiguration

LOWEST_ID: Final = 1_000
"""Random ids start here: below are a vocabulary's special and single-byte tokens."""

CHAT_INPUT: Final = (4.0, 1.4)
CHAT_OUTPUT: Final = (5.0, 1.0)
"""Mean and deviation of the logarithms of lengths: short questions with a long tail, answers of some 150 tokens. Of
the shape that chat logs such as ShareGPT's have, and made up: no text of anybody is sent."""

LONGEST: Final = 2048


class OnlineWorkload(Enum):
    """RANDOM: all lengths equal. CHAT: lengths as in chat logs. SHARED_PREFIX: some prefixes, asked for time and again.
    TRACE: a file says what is sent and when."""

    RANDOM = "random"
    CHAT = "chat"
    SHARED_PREFIX = "shared-prefix"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text or token ids, and how many tokens of answer are asked for. `num_input` is 0 where only the server knows."""

    prompt: str | list[int]
    output_len: int

    @property
    def num_input(self) -> int:
        return 0 if isinstance(self.prompt, str) else len(self.prompt)


def chat(num_prompts: int, *, vocab_size: int, seed: int) -> list[Prompt]:
    """Random tokens with lengths as in chat logs, at most `LONGEST` each."""
    draw = random.Random(seed)

    def length(shape: tuple[float, float]) -> int:
        return max(1, min(LONGEST, round(draw.lognormvariate(*shape))))

    return [Prompt(_ids(draw, length(CHAT_INPUT), vocab_size), length(CHAT_OUTPUT)) for _ in range(num_prompts)]


def shared_prefix(
    num_prompts: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """Each prompt is one of the prefixes, drawn by Zipf's law, and `input_len` random tokens of its own."""
    check_positive(num_prefixes=num_prefixes, prefix_len=prefix_len, input_len=input_len, output_len=output_len)
    draw = random.Random(seed)
    prefixes = [_ids(draw, prefix_len, vocab_size) for _ in range(num_prefixes)]
    weights = [1 / rank for rank in range(1, num_prefixes + 1)]
    chosen = draw.choices(prefixes, weights, k=num_prompts)
    return [Prompt(prefix + _ids(draw, input_len, vocab_size), output_len) for prefix in chosen]


def read_trace(path: Path, *, vocab_size: int, seed: int) -> tuple[list[Prompt], list[float]]:
    """Lines of JSON with `at` (seconds, ascending), `output_len`, and `prompt`, `prompt_token_ids` or `input_len`; the
    prompts, and when each is sent. Raises `InvalidConfiguration` naming the line that is not so."""
    draw = random.Random(seed)
    prompts: list[Prompt] = []
    times: list[float] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            item = line_object(line)
            prompts.append(Prompt(_traced_prompt(item, draw, vocab_size), int(item["output_len"])))
            times.append(float(item["at"]))
            if len(times) > 1 and times[-1] < times[-2]:
                raise ValueError(f"at {times[-1]} comes after {times[-2]}")
        except (ValueError, KeyError, TypeError) as fault:
            raise InvalidConfiguration(
                f"{path}:{number} is no request of a trace: {said(fault)}", param="trace"
            ) from fault
    if not prompts:
        raise InvalidConfiguration(f"{path} holds no request", param="trace")
    return prompts, [at - times[0] for at in times]


def line_object(line: str) -> dict[str, Any]:
    """Raises `ValueError` for what is no object of JSON."""
    item = json.loads(line)
    if not isinstance(item, dict):
        raise ValueError("it is no JSON object")
    return item


def said(fault: Exception) -> str:
    """What is wrong with a line of a file, in words."""
    if isinstance(fault, KeyError):
        return f"{fault.args[0]} is missing"
    return f"it is not JSON: {fault}" if isinstance(fault, json.JSONDecodeError) else str(fault)


def _traced_prompt(item: dict[str, Any], draw: random.Random, vocab_size: int) -> str | list[int]:
    if "prompt" in item:
        return str(item["prompt"])
    if "prompt_token_ids" in item:
        return [int(token) for token in item["prompt_token_ids"]]
    return _ids(draw, int(item["input_len"]), vocab_size)


def arrivals(num_requests: int, request_rate: float, burstiness: float, *, seed: int) -> Iterator[float]:
    """When each request is sent, in seconds from the start. Gaps follow a gamma distribution of mean 1 / rate whose
    shape is `burstiness`: 1 is a Poisson process, less is burstier, more is more even; at an infinite rate all at once.
    """
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if not value > 0:
            raise InvalidConfiguration(f"{name} must be positive, not {value}", param=name)
    draw = random.Random(seed)
    now = 0.0
    for _ in range(num_requests):
        yield now
        if not math.isinf(request_rate):
            now += draw.gammavariate(burstiness, 1 / (request_rate * burstiness))


def parse_slo(parts: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50 e2el:2000` as milliseconds by measure. Raises `InvalidConfiguration`."""
    slo: dict[str, float] = {}
    for part in parts:
        name, _, limit = part.partition(":")
        try:
            slo[name] = float(limit)
        except ValueError as fault:
            raise InvalidConfiguration(f"--goodput {part}: write MEASURE:MILLISECONDS", param="goodput") from fault
        if name not in ("ttft", "tpot", "e2el") or not slo[name] > 0:
            raise InvalidConfiguration(
                f"--goodput {part}: the measures are ttft, tpot and e2el, in milliseconds above 0", param="goodput"
            )
    return slo


def _ids(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    if vocab_size <= LOWEST_ID:
        raise InvalidConfiguration(f"vocab_size must exceed {LOWEST_ID}, not be {vocab_size}", param="vocab_size")
    return [draw.randrange(LOWEST_ID, vocab_size) for _ in range(length)]
