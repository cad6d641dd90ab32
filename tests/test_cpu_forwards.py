"""The compiled decode on the CPU equals the decoder in plain torch, layer layouts and row counts alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.slices import Method, Slice
from tests.torch_rig import chunk
from worker.batch import Batch, cut
from worker.cpu.forwards import CpuForwards
from worker.cpu.linear import MOST_ROWS, SmallLinear, compile_small_linear, run
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.dummy_weights import dummy_weights
from worker.models.rope import Rope

NUM_CELLS, CONTEXT = 300, 64


def random_decoder(*, qk_norm: bool, biased: bool, window: int | None, vocab_size: int) -> Decoder:
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=36,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        rope=Rope(theta=10_000.0),
        context=CONTEXT,
        windows=(None, window, None),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        qk_norm=qk_norm,
    )
    weights = dummy_weights(config, torch.float32, torch.device("cpu"), seed=0)
    for layer in weights.layers:  # norms of 1 and biases of 0 would hide one that is left out
        for name in layer.__slots__:
            tensor = getattr(layer, name)
            if tensor is not None:
                tensor.normal_(0.5, 0.5) if tensor.dim() == 1 else tensor.normal_(0, 0.2)
    return Decoder(config, weights, CONTEXT)


def pool_of(decoder: Decoder, seed: int) -> KvPool:
    config = decoder.config
    pool = KvPool(
        config.num_layers, NUM_CELLS, config.num_kv_heads, config.head_dim, torch.float32, torch.device("cpu")
    )
    torch.manual_seed(seed)
    pool.keys.normal_()
    pool.values.normal_()
    return pool


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
    decoder = random_decoder(qk_norm=qk_norm, biased=biased, window=window, vocab_size=50)
    batch = lone_tokens(lengths, seed=len(lengths))
    ours, theirs = pool_of(decoder, 1), pool_of(decoder, 1)
    rows = list(range(len(lengths)))
    logits = CpuForwards(decoder, ours).run(batch, Method.DECODE, rows).rows(rows)
    expected = EagerForwards(decoder, theirs).run(batch, Method.DECODE, rows).rows(rows)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    decoder = random_decoder(qk_norm=False, biased=False, window=None, vocab_size=50)
    pool, batch = pool_of(decoder, 2), lone_tokens([5, 6, 7], seed=3)
    pool.keys[1, batch.pieces[1].chunk.cells[2]] = torch.nan
    logits = CpuForwards(decoder, pool).run(batch, Method.DECODE, [0, 1, 2]).rows([0, 1, 2])
    assert logits.isfinite().all(dim=1).tolist() == [True, False, True]


def test_only_wanted_rows_have_logits_in_the_order_asked_for() -> None:
    decoder = random_decoder(qk_norm=False, biased=False, window=None, vocab_size=50)
    pool, batch = pool_of(decoder, 4), lone_tokens([3, 4, 5], seed=5)
    forwards = CpuForwards(decoder, pool)
    all_rows = forwards.run(batch, Method.DECODE, [0, 1, 2]).rows([0, 1, 2])
    some = forwards.run(batch, Method.DECODE, [0, 2])
    torch.testing.assert_close(some.rows([2, 2]), all_rows[[2, 2]], rtol=1e-4, atol=1e-5)
    assert forwards.run(batch, Method.DECODE, []).rows([]).shape == (0, 50)


def test_beats_grow_with_every_layer() -> None:
    decoder = random_decoder(qk_norm=False, biased=False, window=None, vocab_size=50)
    forwards = CpuForwards(decoder, pool_of(decoder, 6))
    forwards.run(lone_tokens([3], seed=7), Method.DECODE, [0])
    assert forwards.num_beats >= decoder.config.num_layers
