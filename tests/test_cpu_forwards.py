"""The compiled decode on the CPU equals the decoder in plain torch, layer layouts and row counts alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.slices import Method, Slice
from tests.cpu_rig import CPU, VOCAB_SIZE, check_against_torch, random_pool, small_config
from tests.torch_rig import chunk
from worker.batch import Batch, cut
from worker.cpu.forwards import CpuForwards
from worker.cpu.linear import MOST_ROWS, SmallLinear, compile_small_linear, run
from worker.models.decoder import Decoder
from worker.models.dummy_weights import dummy_weights

NUM_CELLS, CONTEXT = 300, 64


def random_decoder(*, qk_norm: bool = False, biased: bool = False, window: int | None = None) -> Decoder:
    config = small_config(24, 36, 8, CONTEXT, qk_norm=qk_norm, biased=biased, window=window)
    weights = dummy_weights(config, torch.float32, CPU, seed=0)
    for layer in weights.layers:  # norms of 1 and biases of 0 would hide one that is left out
        for name in layer.__slots__:
            tensor = getattr(layer, name)
            if tensor is not None:
                tensor.normal_(0.5, 0.5) if tensor.dim() == 1 else tensor.normal_(0, 0.2)
    return Decoder(config, weights, CONTEXT)


def lone_tokens(lengths: list[int], seed: int) -> Batch:
    """Sequences of these many positions in scattered cells, the last position of each in the forward."""
    free = np.random.default_rng(seed).permutation(NUM_CELLS).astype(np.int32)
    ends = np.cumsum(lengths)
    chunks = [
        chunk([row], free[end - length : end], start=length - 1)
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    batch = cut(chunks, Slice(0, len(chunks), Method.DECODE), wanted=lambda index: True)
    assert batch is not None
    return batch


@pytest.fixture(scope="module")
def linear() -> SmallLinear:
    torch.set_num_threads(1)
    return compile_small_linear()


@pytest.mark.parametrize("biased", [False, True])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, MOST_ROWS), outputs=st.integers(1, 13), size=st.integers(1, 70), seed=st.integers(0, 99))
def test_a_product_of_few_rows_is_right_at_every_size(
    linear: SmallLinear, biased: bool, rows: int, outputs: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, size), torch.randn(outputs, size)
    bias = torch.randn(outputs) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(run(linear, x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("qk_norm", "biased", "window"), [(False, False, None), (True, False, None), (False, True, None), (True, True, 4)]
)
@pytest.mark.parametrize("lengths", [[1], [17], [9, 1, 30], [12] * 15, [40] * 5, [3] * (MOST_ROWS + 4)])
def test_a_compiled_decode_equals_the_decoder_in_torch(
    qk_norm: bool, biased: bool, window: int | None, lengths: list[int]
) -> None:
    decoder = random_decoder(qk_norm=qk_norm, biased=biased, window=window)
    check_against_torch(CpuForwards, decoder, lone_tokens(lengths, seed=len(lengths)), Method.DECODE, NUM_CELLS)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    decoder = random_decoder()
    pool, batch = random_pool(decoder, NUM_CELLS, seed=2), lone_tokens([5, 6, 7], seed=3)
    pool.keys[1, batch.pieces[1].chunk.cells[2]] = torch.nan
    logits = CpuForwards(decoder, pool).run(batch, Method.DECODE, [0, 1, 2]).rows([0, 1, 2])
    assert logits.isfinite().all(dim=1).tolist() == [True, False, True]


def test_only_wanted_rows_have_logits_in_the_order_asked_for() -> None:
    decoder = random_decoder()
    pool, batch = random_pool(decoder, NUM_CELLS, seed=4), lone_tokens([3, 4, 5], seed=5)
    forwards = CpuForwards(decoder, pool)
    all_rows = forwards.run(batch, Method.DECODE, [0, 1, 2]).rows([0, 1, 2])
    some = forwards.run(batch, Method.DECODE, [0, 2])
    torch.testing.assert_close(some.rows([2, 2]), all_rows[[2, 2]], rtol=1e-4, atol=1e-5)
    assert forwards.run(batch, Method.DECODE, []).rows([]).shape == (0, VOCAB_SIZE)


def test_beats_grow_with_every_layer() -> None:
    decoder = random_decoder()
    forwards = CpuForwards(decoder, random_pool(decoder, NUM_CELLS, seed=6))
    forwards.run(lone_tokens([3], seed=7), Method.DECODE, [0])
    assert forwards.num_beats >= decoder.config.num_layers
