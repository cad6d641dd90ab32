"""The compiled pass over layers of blocks equals the decoder in plain torch, whatever a forward is made of."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.slices import Method, Slice
from tests.cpu_rig import CPU, VOCAB_SIZE, check_against_torch, random_pool, small_config
from tests.test_block_matrices import random_tiles
from tests.torch_rig import chunk
from worker.batch import Batch, cut
from worker.cpu.block_forwards import BlockForwards, has_block_pass
from worker.cpu.forwards import CpuForwards, forwards_of
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool
from worker.models.block_matrix import BlockMatrix
from worker.models.blocks import BlockLayout
from worker.models.decoder import Decoder
from worker.models.dummy_weights import dummy_weights

NUM_CELLS, CONTEXT = 400, 128
NIBBLES, BYTES, SMALL = BlockLayout(4, 32, True), BlockLayout(8, 32, False), BlockLayout(8, 16, False)


def matrix_like(like: torch.Tensor, layout: BlockLayout, seed: int) -> BlockMatrix:
    """Random blocks of the same shape, with values of a size that keeps a decoder's sums small."""
    tiles = random_tiles(layout, len(like), like.shape[1] // layout.size, seed)
    floats = tiles.data[:, :, layout.code_bytes :].view(np.float32)
    floats *= np.float32(0.02 if layout.bits == 4 else 0.001)
    return BlockMatrix(tiles)


@functools.cache
def block_decoder(
    layouts: tuple[BlockLayout, BlockLayout] = (NIBBLES, BYTES),
    *,
    qk_norm: bool = False,
    biased: bool = False,
    window: int | None = None,
) -> Decoder:
    config = small_config(64, 96, 16, CONTEXT, qk_norm=qk_norm, biased=biased, window=window)
    plain = dummy_weights(config, torch.float32, CPU, seed=0)
    layers = []
    for index, layer in enumerate(plain.layers):
        changes = {}
        for place, name in enumerate(layer.__slots__):
            tensor = getattr(layer, name)
            if tensor is not None and tensor.dim() == 1:
                tensor.normal_(0.5, 0.5)  # norms of 1 and biases of 0 would hide one that is left out
            elif tensor is not None:
                changes[name] = matrix_like(tensor, layouts[name == "down"], seed=10 * index + place)
        layers.append(dataclasses.replace(layer, **changes))
    head = matrix_like(plain.head, layouts[1], seed=99)
    return Decoder(config, dataclasses.replace(plain, layers=tuple(layers), head=head), CONTEXT)


def batch_of(spans: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Chunks of `length` tokens behind `start` positions that are there already, in scattered cells."""
    random = np.random.default_rng(seed)
    free = random.permutation(NUM_CELLS).astype(np.int32)
    chunks, first = [], 0
    for start, length in spans:
        tokens = random.integers(0, VOCAB_SIZE, length).tolist()
        chunks.append(chunk(tokens, free[first : first + start + length], start=start))
        first += start + length
    batch = cut(chunks, Slice(0, sum(length for _, length in spans), Method.PREFILL), wanted=lambda index: True)
    assert batch is not None
    return batch


def check(decoder: Decoder, batch: Batch) -> None:
    check_against_torch(BlockForwards, decoder, batch, Method.PREFILL, NUM_CELLS)


def pool_of(decoder: Decoder) -> KvPool:
    return random_pool(decoder, NUM_CELLS, seed=3)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("qk_norm", "biased", "window"), [(False, False, None), (True, False, None), (False, True, None), (True, True, 4)]
)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(16, 1)],
        [(8, 1), (0, 1), (29, 1)],
        [(11, 1)] * 16,
        [(3, 1)] * 20,
        [(0, 40)],
        [(30, 17), (0, 3), (9, 1)],
    ],
    ids=str,
)
def test_a_pass_equals_the_decoder_in_torch(
    num_threads: int, qk_norm: bool, biased: bool, window: int | None, spans: list[tuple[int, int]]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(block_decoder(qk_norm=qk_norm, biased=biased, window=window), batch_of(spans))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 35)), min_size=1, max_size=6),
    layouts=st.tuples(*[st.sampled_from([NIBBLES, BYTES, SMALL])] * 2),
    seed=st.integers(0, 99),
)
def test_whatever_pieces_and_layouts_a_forward_has(
    spans: list[tuple[int, int]], layouts: tuple[BlockLayout, BlockLayout], seed: int
) -> None:
    check(block_decoder(layouts), batch_of(spans, seed))


def test_a_forward_that_wants_no_logits_still_writes_its_cells() -> None:
    decoder, batch = block_decoder(), batch_of([(0, 9)])
    ours, theirs = pool_of(decoder), pool_of(decoder)
    assert BlockForwards(decoder, ours).run(batch, Method.PREFILL, []).rows([]).shape == (0, VOCAB_SIZE)
    EagerForwards(decoder, theirs).run(batch, Method.PREFILL, [])
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)


def test_a_pass_gets_on_layer_by_layer() -> None:
    decoder = block_decoder()
    forwards = BlockForwards(decoder, pool_of(decoder))
    forwards.run(batch_of([(0, 5)]), Method.PREFILL, [])
    assert forwards.num_beats >= decoder.config.num_layers


def test_what_is_not_a_number_comes_through() -> None:
    decoder, batch = block_decoder(), batch_of([(4, 1), (6, 1)])
    pool = pool_of(decoder)
    pool.keys[1, int(batch.pieces[1].chunk.cells[2])] = float("nan")
    logits = BlockForwards(decoder, pool).run(batch, Method.DECODE, [0, 1]).rows([0, 1])
    assert torch.isfinite(logits[0]).all()
    assert torch.isnan(logits[1]).all()


def test_only_whole_tiles_of_blocks_make_a_pass() -> None:
    decoder = block_decoder()
    assert has_block_pass(decoder)
    assert isinstance(forwards_of(decoder, pool_of(decoder)), BlockForwards)
    plain = dummy_weights(decoder.config, torch.float32, CPU, seed=0)
    dense = Decoder(decoder.config, plain, CONTEXT)
    assert not has_block_pass(dense)
    assert isinstance(forwards_of(dense, pool_of(dense)), CpuForwards)
    mixed = dataclasses.replace(
        decoder.weights, layers=(dataclasses.replace(decoder.weights.layers[0], down=plain.layers[0].down),)
    )
    assert not has_block_pass(
        Decoder(dataclasses.replace(decoder.config, num_layers=1, windows=(None,)), mixed, CONTEXT)
    )
