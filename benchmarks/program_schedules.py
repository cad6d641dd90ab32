"""Whether a program on a CPU gives the tokens of its eager model, under each schedule; used by `program_start`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

SIZES = (1, 2, 5, 16, 40, 130)
NUM_TOKENS = 6
LONGER, FEW_CELLS = 24, 90
"""Answers of so many tokens, to all prompts but the longest, begin together in so many cells and outgrow them."""


def compare(program: str, model: str) -> dict[str, bool]:
    """Whether the program gives the eager model's tokens, by schedule."""
    from planner.request import Request, SamplingParams
    from tests.torch_rig import Rig, request
    from worker.config import EngineConfig
    from worker.program import build_executor

    def engine(path: str, cells: int, **changes: Any) -> Any:
        settings: dict[str, Any] = {"model": path, "device": "cpu", "max_model_len": 2048, "max_cells": cells}
        return build_executor(EngineConfig(**(settings | changes)))

    random = np.random.default_rng(5)
    prompts = [random.integers(0, 49152, size=size).tolist() for size in SIZES]

    def requests(n: int = 1) -> Sequence[Request]:
        return [request(prompt, NUM_TOKENS, SamplingParams(temperature=0.0), n=n) for prompt in prompts]

    def longer() -> Sequence[Request]:
        return [request(prompt, LONGER, SamplingParams(temperature=0.0)) for prompt in prompts[:-1]]

    eager = Rig(engine(model, 2048))
    expected, expected_of_longer = eager.answer_alone(requests()), eager.answer_alone(longer())
    roomy = engine(program, 2048)
    cramped = Rig(engine(program, FEW_CELLS))
    same = {
        "alone": Rig(roomy).answer_alone(requests()) == expected,
        "batched": Rig(roomy).answer(requests()) == expected,
        "chunks of 8": Rig(roomy, prefill_chunk_tokens=8).answer(requests()) == expected,
        "preempted": cramped.answer(longer()) == expected_of_longer and cramped.planner.metrics.num_preemptions > 0,
        "forked": Rig(roomy).answer(requests(3)) == [answer * 3 for answer in expected],
        "m = 5": Rig(engine(program, 2048, min_prefill_tokens=5)).answer(requests()) == expected,
    }
    print(json.dumps(same))
    return same
