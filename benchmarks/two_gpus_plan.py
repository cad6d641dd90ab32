"""How much each part of `benchmarks.two_gpus` does: in full, on GPUs to find faults, and on CPUs as a dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Literal

NUM_WORKERS: Final = 2
MODEL_NAME: Final = "two"
PATIENCE_S: Final = 120.0

Note = Callable[..., None]
"""Keeps figures by their names, so that what was measured before a fault is not lost."""


class Part(StrEnum):
    """What is measured, each by itself and in this order; see the module of each, `benchmarks.two_gpus_*`."""

    CELLS = "cells"
    MIXED = "mixed"
    LOSSES = "losses"
    PREFIXES = "prefixes"
    EXACT = "exact"


class Scale(StrEnum):
    DRY = "dry"
    SMALL = "small"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """So many prompts for each worker, prompts and answers of lengths drawn evenly from `lengths`; and how often that
    is run with one worker and with two. Nobody knows beforehand how long an answer will be, so two workers never get
    equally many tokens, and their time differs from run to run."""

    prompts_each: int
    lengths: tuple[int, int]
    repeats: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LostLoad:
    """Streams of one length that run on both workers when one of these is lost."""

    streams: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """Requests that begin with one of some prefixes, by Zipf's law, `rate` a second, at workers with `max_cells`."""

    num_prefixes: int
    prefix_len: int
    input_len: int
    output_len: int
    num_requests: int
    rate: float
    max_cells: int


@dataclass(frozen=True, slots=True)
class MovedCells:
    """Sequences of so many tokens, of which half of the answer is made at one worker and half at the other; and how
    often as many cells are moved to time that alone."""

    input_len: int
    output_len: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`fast_model` is for speed in its own dtype, `exact_model` runs in float32. `num_clients` are processes that ask.

    `limits_s` is how long each part may take before it is ended.
    """

    device: Literal["cpu", "cuda"]
    fast_model: str
    exact_model: str
    context: int
    step_tokens: int
    max_num_seqs: int
    num_gateways: int
    num_clients: int
    mixed: MixedLoad
    lost: LostLoad
    prefixes: PrefixLoad
    moved: MovedCells
    exact_requests: int
    exact_tokens: tuple[int, int]
    limits_s: dict[Part, float]

    def as_config(self) -> dict[str, Any]:
        return asdict(self) | {"num_workers": NUM_WORKERS}


_FULL: Final = Plan(
    device="cuda",
    fast_model="llama-8b",
    exact_model="small",
    context=4096,
    step_tokens=16_384 + 256,
    max_num_seqs=288,
    num_gateways=4,
    num_clients=8,
    mixed=MixedLoad(256, (100, 1000), repeats=(1, 4)),
    lost=LostLoad(64, input_len=200, output_len=600),
    prefixes=PrefixLoad(16, 3000, input_len=100, output_len=100, num_requests=500, rate=40.0, max_cells=36_000),
    moved=MovedCells(3500, 64, repeats=5),
    exact_requests=60,
    exact_tokens=(100, 300),
    limits_s={Part.CELLS: 120, Part.MIXED: 240, Part.LOSSES: 110, Part.PREFIXES: 110, Part.EXACT: 130},
)

PLANS: Final[dict[Scale, Plan]] = {
    Scale.FULL: _FULL,
    Scale.SMALL: Plan(
        device="cuda",
        fast_model="qwen3-0.6b",
        exact_model="small",
        context=4096,
        step_tokens=8192 + 256,
        max_num_seqs=64,
        num_gateways=4,
        num_clients=4,
        mixed=MixedLoad(48, (50, 200), repeats=(1, 1)),
        lost=LostLoad(32, input_len=100, output_len=600),
        prefixes=PrefixLoad(8, 1500, input_len=50, output_len=30, num_requests=100, rate=40.0, max_cells=9000),
        moved=MovedCells(2000, 32, repeats=3),
        exact_requests=30,
        exact_tokens=(60, 200),
        limits_s=dict.fromkeys(Part, 70.0),
    ),
    Scale.DRY: Plan(
        device="cpu",
        fast_model="tiny",
        exact_model="tiny",
        context=1024,
        step_tokens=256,
        max_num_seqs=32,
        num_gateways=2,
        num_clients=2,
        mixed=MixedLoad(6, (10, 40), repeats=(1, 1)),
        lost=LostLoad(8, input_len=20, output_len=300),
        prefixes=PrefixLoad(4, 192, input_len=10, output_len=5, num_requests=24, rate=20.0, max_cells=600),
        moved=MovedCells(100, 16, repeats=2),
        exact_requests=12,
        exact_tokens=(40, 120),
        limits_s=dict.fromkeys(Part, 400.0),
    ),
}
