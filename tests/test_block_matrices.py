"""Matrices that stay in a GGUF file's blocks: their values, products with them, and models that have them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from planner.errors import InvalidCheckpoint
from tests.tiny_gguf import Types, write_gguf
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.config import EngineConfig
from worker.models.block_matrix import BlockMatrix
from worker.models.blocks import Arena, BlockLayout, Blocks, Bytes, Tiles, tiled
from worker.models.gguf_blocks import KEPT_TYPES, blocks_of
from worker.program import load_program

# Where a type's bytes are float16, which random bytes would make infinite.
HALVES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def random_bytes(kind: Type, num_rows: int, blocks_a_row: int) -> Bytes:
    random = np.random.default_rng(kind.value)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (num_rows * blocks_a_row, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        data[:, at : at + 2] = random.normal(size=(len(data), 1)).astype(np.float16).view(np.uint8)
    return data.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", KEPT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_blocks_hold_the_very_values_that_dequantising_gives(kind: Type, num_rows: int) -> None:
    data = random_bytes(kind, num_rows, 2)
    blocks = blocks_of(data, kind)
    assert blocks is not None
    backwards = np.arange(num_rows)[::-1]
    assert np.array_equal(tiled(blocks, Arena()).values(backwards), gguf.dequantize(data, kind)[backwards])


def test_types_without_blocks_of_numbers_are_not_kept() -> None:
    assert blocks_of(np.zeros((1, 34), dtype=np.uint8), Type.IQ4_NL) is None


def random_tiles(layout: BlockLayout, num_rows: int, num_blocks: int, seed: int) -> Tiles:
    random = np.random.default_rng(seed)
    least, most = (0, 16) if layout.bits == 4 else (-128, 128)
    codes = random.integers(least, most, (num_rows, num_blocks * layout.size)).astype(np.int8)
    scales, offsets = random.normal(size=(2, num_rows, num_blocks)).astype(np.float32)
    return tiled(Blocks(layout, codes, scales, offsets if layout.has_offsets else None), Arena())


@pytest.mark.parametrize(
    "layout",
    [BlockLayout(4, 32, True), BlockLayout(8, 32, False), BlockLayout(8, 32, True), BlockLayout(8, 16, False)],
    ids=repr,
)
@pytest.mark.parametrize("biased", [False, True])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 50), blocks=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_product_is_that_of_the_values(
    layout: BlockLayout, biased: bool, rows: int, outputs: int, blocks: int, seed: int
) -> None:
    torch.set_num_threads(1)
    tiles = random_tiles(layout, outputs, blocks, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tiles.num_columns, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    weight = torch.from_numpy(tiles.values(np.arange(outputs))).double()
    expected = functional.linear(x.double(), weight, None if bias is None else bias.double())
    # Every product and sum may be rounded: by as much as all terms together are large.
    allowed = functional.linear(x.double().abs(), weight.abs()).max().item() * 1e-6
    result = functional.linear(x, BlockMatrix(tiles), bias)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=allowed)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    matrix = BlockMatrix(random_tiles(BlockLayout(4, 32, has_offsets=True), 16, 2, seed=1))
    x = torch.ones(3, 64)
    x[1, 5] = torch.nan
    assert functional.linear(x, matrix).isfinite().all(dim=1).tolist() == [True, False, True]


def test_a_matrix_in_blocks_has_no_other_operation() -> None:
    matrix = BlockMatrix(random_tiles(BlockLayout(4, 32, has_offsets=True), 20, 2, seed=2))
    assert (matrix.shape, matrix.dtype, matrix.device.type) == ((20, 64), torch.float32, "cpu")
    for refused in (lambda: torch.add(matrix, 1), lambda: matrix.clone(), lambda: matrix.to(torch.bfloat16)):
        with pytest.raises(TypeError, match="BlockMatrix has linear and embedding alone"):
            refused()


def kinds_of_a_mixed_file(name: str) -> Type:
    """One matrix in blocks beside others of its product that are not, and products of other layouts."""
    if "v_proj" in name:
        return Type.F16
    return Type.Q8_0 if "embed" in name or "lm_head" in name else Type.Q5_1 if "down" in name else Type.Q4_0


@pytest.mark.parametrize(
    ("name", "architecture", "types", "kept"),
    [
        ("llama", "llama", lambda name: Type.Q4_1, 3 * 4 + 2),
        ("qwen3", "qwen3", lambda name: Type.Q8_0, 3 * 4 + 1),
        ("llama", "llama", kinds_of_a_mixed_file, 3 * 3 + 2),
    ],
    ids=["llama", "tied_qwen3", "mixed"],
)
def test_a_model_in_blocks_answers_as_its_dequantised_weights_do(
    tmp_path: Path, name: str, architecture: str, types: Types, kept: int
) -> None:
    model = save_tiny_model(name, tmp_path, sizes=SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, architecture=architecture, types=types)
    program = load(str(path))
    plain = load_program(EngineConfig(model=str(path), device="cpu", dtype="float32"), keep_blocks=False)
    assert (program.info.num_block_matrices, plain.info.num_block_matrices) == (kept, 0)
    assert program.info.weight_bytes < plain.info.weight_bytes / 2
    prompts = [PROMPT, [7] * 21, *([5, token] for token in range(18))]
    rigs = [Rig(executor_of(each, 900)) for each in (program, plain)]
    ours, theirs = (rig.answer([request(prompt, 8) for prompt in prompts]) for rig in rigs)
    assert ours == theirs


def test_other_dtypes_have_plain_tensors(tmp_path: Path) -> None:
    write_gguf(save_tiny_model("llama", tmp_path, sizes=SIZES), tmp_path / "tiny.gguf", types=lambda name: Type.Q8_0)
    program = load_program(EngineConfig(model=str(tmp_path / "tiny.gguf"), device="cpu", dtype="bfloat16"))
    assert program.info.num_block_matrices == 0
    assert program.decoder.weights.head.dtype == torch.bfloat16


def test_a_matrix_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path, sizes=SIZES)
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(64, 128))
    write_gguf(model, tmp_path / "tiny.gguf", types=lambda name: Type.Q8_0)
    with pytest.raises(InvalidCheckpoint, match=r"layers\.1\.mlp\.down_proj\.weight has shape \(64, 128\)"):
        load(str(tmp_path / "tiny.gguf"))
