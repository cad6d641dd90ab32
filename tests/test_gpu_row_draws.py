"""Draws of rows that bring their settings, by the device's sampler, against torch's.

Runs on a GPU, or in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_row_draws.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from planner.request import SamplingParams
from tests.cuda_rig import DEVICE, INTERPRETED
from worker.cuda.row_draws import RowDraws
from worker.cuda.sampler import GpuSampler
from worker.sampler import Draw, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
VOCAB_SIZE = 9001
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(min_p=0.05),
)


def draws_of(*settings: SamplingParams) -> list[Draw]:
    """Each at a position and with a seed of its own, the widest seeds among them."""
    return [
        Draw(replace(one, seed=2**64 - 1 - 7 * row), 100 + row, np.arange(100 + row), num_prompt=60)
        for row, one in enumerate(settings)
    ]


def logits_of(num_rows: int) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def test_rows_of_any_settings_draw_as_torch_does_in_one_launch_or_several() -> None:
    logits, draws = logits_of(10), draws_of(*SETTINGS, *SETTINGS)
    before, expected = logits.clone(), sample(logits, draws).tokens
    for at_once in (16, 10, 3):
        assert torch.equal(RowDraws(at_once, VOCAB_SIZE, DEVICE)(logits, draws).tokens, expected)
    assert torch.equal(logits, before)


def test_penalties_biases_and_masks_have_their_say_first() -> None:
    logits = logits_of(4)
    best = int(logits[3].argmax())
    allowed = np.zeros(VOCAB_SIZE // 8 + 1, dtype=np.uint8)
    allowed[5] = 0b100
    penalised, biased, masked, kept = draws_of(
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(logit_bias=((42, 50.0),)),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0),
    )
    draws = [penalised, biased, replace(masked, allowed=allowed), replace(kept, masked=frozenset({best}))]
    found = RowDraws(4, VOCAB_SIZE, DEVICE)(logits, draws).tokens
    assert torch.equal(found, sample(logits, draws).tokens)
    assert found[1:3].tolist() == [42, 42]
    assert int(found[3]) != best


def test_another_position_is_another_draw() -> None:
    logits, draws = logits_of(8), draws_of(*[SamplingParams(temperature=2.0)] * 8)
    row_draws = RowDraws(8, VOCAB_SIZE, DEVICE)
    later = [replace(draw, position=draw.position + 1) for draw in draws]
    assert not torch.equal(row_draws(logits, draws).tokens, row_draws(logits, later).tokens)


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_one_compiled_kernel_serves_any_number_of_rows(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a pointer that is no multiple of 16 bytes Triton compiles another one."""
    given: list[Tensor] = []
    monkeypatch.setattr(GpuSampler, "sample", lambda sampler, logits, *tensors: given.extend(tensors))
    RowDraws(16, VOCAB_SIZE, DEVICE)(logits_of(num_rows), draws_of(*[SamplingParams(top_p=0.9)] * num_rows))
    assert len(given) == 9
    assert all(tensor.data_ptr() % 16 == 0 for tensor in given)
    assert all(len(tensor) >= num_rows for tensor in given)
