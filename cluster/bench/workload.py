"""Seeded loads for the offline benchmark: what is asked, and how much of it. Not for running it, and not for timing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from planner.errors import InvalidConfiguration

# Ids are drawn from a range that any vocabulary of a current model holds, then folded into a smaller one.
LOWEST_ID, HIGHEST_ID = 1_000, 100_000


class Workload(Enum):
    """The shapes of load that the offline benchmark knows."""

    DECODE = "decode"
    MIXED = "mixed"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a load: token ids in, `output_len` tokens out."""

    prompt: tuple[int, ...]
    output_len: int


def uniform(num_prompts: int, input_len: int, output_len: int, *, vocab_size: int, seed: int) -> list[Item]:
    """`num_prompts` random prompts that all have the same two lengths."""
    check_positive(num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    draw = random.Random(seed)
    return [Item(_prompt(draw, input_len, vocab_size), output_len) for _ in range(num_prompts)]


def mixed(num_prompts: int, lengths: tuple[int, int], *, vocab_size: int, seed: int) -> list[Item]:
    """Prompt and answer lengths drawn evenly from `lengths`, both ends included; all prompts first, then all answers.

    Neither `vocab_size` nor the ids drawn change the lengths, so that every model gets the same load: 256 prompts of
    100..1024 tokens with seed 0 are 145,573 tokens in and 147,164 out.
    """
    low, high = lengths
    check_positive(num_prompts=num_prompts, shortest=low, longest=high - low + 1)
    draw = random.Random(seed)
    prompts = [_prompt(draw, draw.randint(low, high), vocab_size) for _ in range(num_prompts)]
    return [Item(prompt, draw.randint(low, high)) for prompt in prompts]


def total_input(items: Sequence[Item]) -> int:
    return sum(len(item.prompt) for item in items)


def total_output(items: Sequence[Item]) -> int:
    return sum(item.output_len for item in items)


def _prompt(draw: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.randrange(LOWEST_ID, HIGHEST_ID) % vocab_size for _ in range(length))


def check_positive(**values: int) -> None:
    """Raises `InvalidConfiguration` for the first that is not."""
    for name, value in values.items():
        if value < 1:
            raise InvalidConfiguration(f"{name} must be at least 1, not {value}", param=name)
