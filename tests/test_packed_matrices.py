"""Matrices of eight and four bits: what they stand for, how their codes lie, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from planner.errors import InvalidConfiguration
from tests.decode_reference import random_weights
from tests.tiny_models import save_tiny_model
from worker.cuda.decode_plan import Chain, plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.packed import PackedMatrix, pack, pack_int4, pack_int8, pack_weights
from worker.cuda.packed_tiles import product_tile
from worker.models.config import read_config
from worker.models.dummy_weights import dummy_weights
from worker.models.safetensors_source import SafetensorsSource
from worker.models.weights import load_weights

LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14_336, vocab_size=128_256, context=8192,
    norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,) * 32, quantization="int4",
)  # fmt: skip
SMALL = DecodeShape(
    hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96, vocab_size=50, context=16,
    norm_eps=1e-5, dtype=torch.float32, windows=(None,),
)  # fmt: skip


def matrix(seed: int = 0) -> torch.Tensor:
    return torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))


def test_eight_bits_are_off_by_half_a_step_of_their_row_at_most() -> None:
    exact = matrix()
    packed = pack_int8(exact)
    step = exact.abs().amax(dim=1, keepdim=True) / 127
    assert ((packed.values() - exact).abs() <= step * 0.501).all()
    assert packed.codes.shape == (24, 32)
    assert packed.values()[3, exact[3].abs().argmax()] == pytest.approx(float(exact[3, exact[3].abs().argmax()]))


def test_four_bits_are_off_by_half_a_step_of_their_group_at_most() -> None:
    exact = matrix()
    packed = pack_int4(exact)
    groups = exact.view(24, 4, 32)
    step = (groups.amax(dim=2) - groups.amin(dim=2)) / 15
    off = (packed.values() - exact).view(24, 4, 32).abs().amax(dim=2)
    assert (off <= step * 0.56).all(), "scale and least value have eight bits themselves"
    assert packed.codes.shape == (24, 16)
    assert packed.scales.shape == (24, 4)


def test_halves_of_four_words_hold_neighbours_of_each_eight_columns() -> None:
    counted = torch.arange(16.0).repeat(8)[:32].repeat(2, 1)  # the codes 0 to 15, twice
    words = pack_int4(counted).codes
    nibbles = [[(int(word) >> (4 * place)) & 15 for place in range(8)] for word in words[0]]
    expected = [[8 * place + 2 * word + half for half in (0, 1) for place in range(4)] for word in range(4)]
    assert nibbles == [[column % 16 for column in columns] for columns in expected]
    rising = torch.arange(-127.0, 1.0, 8.0)[None]  # sixteen columns, of which a step is one code
    octets = [[(int(word) >> (8 * place)) & 255 for place in range(4)] for word in pack_int8(rising).codes[0]]
    columns = [[8 * place + 2 * word + half for half in (0, 1) for place in range(2)] for word in range(4)]
    assert octets == [[int(rising[0, column]) & 255 for column in each] for each in columns]


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_a_group_of_equal_or_of_no_values_is_exact(pack: object) -> None:
    assert callable(pack)
    for value in (0.0, 3.0, -0.5):
        packed = pack(torch.full((16, 64), value))
        torch.testing.assert_close(packed.values(), torch.full((16, 64), value), atol=0, rtol=1e-6)


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_linear_multiplies_by_the_values_and_nothing_else_is_possible(pack: object) -> None:
    assert callable(pack)
    packed, x, bias = pack(matrix()), torch.randn(3, 128), torch.randn(24)
    torch.testing.assert_close(functional.linear(x, packed, bias), x @ packed.values().t() + bias)
    with pytest.raises(TypeError, match="has linear alone"):
        torch.neg(packed)


def test_a_packed_decoder_keeps_its_embedding_and_counts_its_bytes() -> None:
    plain = random_weights(SMALL, torch.device("cpu"), 0)
    packed = pack_weights(plain, "int4")
    assert packed.embedding is plain.embedding
    assert isinstance(packed.head, PackedMatrix)
    assert packed.head.bits == 8, "whatever the layers have"
    assert all(isinstance(layer.down, PackedMatrix) for layer in packed.layers)
    assert (packed.quantization, plain.quantization) == ("int4", "none")
    fewer = plain.bytes_read - packed.bytes_read
    matrices = [getattr(plain.layers[0], name) for name in ("qkv", "output", "gate_up", "down")]
    # Four bits and a word for 32 of them, instead of 32.
    layers = sum(each.numel() * 4 - each.numel() // 2 - each.numel() // 8 for each in matrices)
    assert fewer == layers + plain.head.numel() * 3 - 4 * len(plain.head)


def test_columns_that_make_no_whole_groups_are_refused_with_the_numbers() -> None:
    narrow = DecodeShape(
        hidden=56, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96, vocab_size=50, context=16,
        norm_eps=1e-5, dtype=torch.float32, windows=(None,),
    )  # fmt: skip
    odd = random_weights(narrow, torch.device("cpu"), 0)
    with pytest.raises(InvalidConfiguration, match="int4 takes matrices of a multiple of 32 columns; qkv has 56") as e:
        pack_weights(odd, "int4")
    assert e.value.param == "quantization"


def test_a_large_model_runs_its_own_kernels_up_to_256_rows() -> None:
    chains = {width: plan_decode(LLAMA_8B, width, hopper=True).chain for width in (1, 2, 64, 256, 257)}
    assert chains == {
        1: Chain.GEMV, 2: Chain.SPLIT_K, 64: Chain.SPLIT_K, 256: Chain.SPLIT_K, 257: Chain.LIBRARY,
    }  # fmt: skip


def test_narrow_matrices_are_cut_along_k_until_the_device_is_busy() -> None:
    narrow, wide, odd = product_tile(4, 1, 1024, 4096), product_tile(8, 20, 28_672, 4096), product_tile(8, 64, 64, 384)
    assert narrow is not None
    assert wide is not None
    assert odd is not None
    assert (narrow.rows, narrow.depth, narrow.splits) == (16, 128, 8)
    assert (wide.rows, wide.depth, wide.splits) == (32, 128, 2)
    assert (odd.rows, odd.columns, odd.splits) == (64, 64, 1)
    assert product_tile(8, 257, 1024, 4096) is None


@pytest.mark.parametrize("stored", [True, False])
def test_a_dense_matrix_is_gone_before_the_next_is_read(tmp_path: Path, stored: bool) -> None:
    save_tiny_model("llama", tmp_path)
    config, dense = read_config(tmp_path), list[weakref.ref[Tensor]]()

    def become(name: str, matrix: Tensor) -> Tensor:
        assert all(made() is None for made in dense), name
        if name == "head":
            return matrix
        dense.append(weakref.ref(matrix))
        return pack(name, matrix, "int8")

    cpu = torch.device("cpu")
    if stored:
        weights = load_weights(config, SafetensorsSource(tmp_path), torch.float32, cpu, become=become)
    else:
        weights = dummy_weights(config, torch.float32, cpu, 0, become)
    assert len(dense) == 4 * config.num_layers
    assert all(isinstance(layer.gate_up, PackedMatrix) for layer in weights.layers)


def test_rows_that_are_packed_apart_are_as_rows_packed_together() -> None:
    for pack_some in (pack_int8, pack_int4):
        whole, apart = pack_some(matrix()), pack_some(matrix(), numbers_at_once=5 * 128)
        assert torch.equal(whole.codes, apart.codes)
        assert torch.equal(whole.scales, apart.scales)
