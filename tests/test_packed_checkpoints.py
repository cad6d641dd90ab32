"""GPTQ, AWQ and compressed-tensors checkpoints are read as they are published; packing here is by plain loops."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from planner.errors import InvalidCheckpoint, UnsupportedModel
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.models.packed_source import PackedSource
from worker.models.packing import read_packing

ROWS, COLUMNS, GROUP = 32, 48, 16
NUM_GROUPS = COLUMNS // GROUP
INT_GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
BYTE_GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}
FLOAT_GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}


class Tensors:
    """A `TensorSource` over a dictionary."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def packed(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned `numbers` in words of 32 bits along `dim`, the lowest bits first."""
    numbers = numbers if dim == 1 else numbers.T
    rows = []
    for row in numbers.tolist():
        each = 32 // bits
        words = [
            sum(int(number) << (bits * place) for place, number in enumerate(row[at : at + each]))
            for at in range(0, len(row), each)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    words = torch.tensor(rows, dtype=torch.int32)
    return words if dim == 1 else words.T.contiguous()


def awq_packed(numbers: Tensor) -> Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = numbers.clone()
    for first in range(0, numbers.shape[1], 8):
        for place, column in enumerate(order):
            shuffled[:, first + place] = numbers[:, first + column]
    return packed(shuffled, 4, dim=1)


class Grouped:
    """A matrix of unsigned numbers [rows, columns], with a scale and a zero point for each group of columns."""

    def __init__(self, bits: int, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.bits = bits
        num_groups = columns // GROUP
        self.numbers = torch.randint(0, 2**bits, (rows, columns), generator=generator)
        self.zeros = torch.randint(0, 2**bits, (rows, num_groups), generator=generator)
        self.scales = torch.rand((rows, num_groups), generator=generator) * 0.1 + 0.01
        self.group_of = torch.arange(columns) // GROUP

    @property
    def exact(self) -> Tensor:
        return (self.numbers - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]

    def gptq(self, zero_offset: int = 1) -> dict[str, Tensor]:
        stored = (self.zeros - zero_offset) % 2**self.bits
        return {
            "qweight": packed(self.numbers.T, self.bits, dim=0),
            "qzeros": packed(stored.T, self.bits, dim=1),
            "scales": self.scales.T.contiguous(),
            "g_idx": self.group_of.to(torch.int32),
        }


def source_of(parts: dict[str, Tensor], settings: dict[str, Any]) -> PackedSource:
    return PackedSource(Tensors({f"m.{name}": tensor for name, tensor in parts.items()}), read_packing(settings))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_of_every_width_and_in_any_order_of_columns(bits: int) -> None:
    matrix = Grouped(bits)
    matrix.group_of = matrix.group_of[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    source = source_of(matrix.gptq(), {"quant_method": "gptq", "bits": bits})
    assert set(source.names()) == {"m.weight"}
    torch.testing.assert_close(source.read("m.weight"), matrix.exact)


def test_the_second_version_of_gptq_stores_zero_points_as_they_are() -> None:
    matrix = Grouped(4)
    source = source_of(matrix.gptq(0), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    torch.testing.assert_close(source.read("m.weight"), matrix.exact)


def test_a_bias_of_zeros_that_gptq_wrote_is_left_out_and_a_real_one_is_kept() -> None:
    settings = {"quant_method": "gptq", "bits": 4}
    idle = source_of(Grouped(4).gptq() | {"bias": torch.zeros(ROWS)}, settings)
    real = source_of(Grouped(4).gptq() | {"bias": torch.ones(ROWS)}, settings)
    assert set(idle.names()) == {"m.weight"}
    assert set(real.names()) == {"m.weight", "m.bias"}


def test_awq() -> None:
    matrix = Grouped(4)
    parts = {
        "qweight": awq_packed(matrix.numbers.T),
        "qzeros": awq_packed(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }
    source = source_of(parts, {"quant_method": "awq", "bits": 4, "version": "GEMM"})
    torch.testing.assert_close(source.read("m.weight"), matrix.exact)


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_of_compressed_tensors(symmetric: bool) -> None:
    matrix = Grouped(4)
    parts = {
        "weight_packed": packed(matrix.numbers, 4, dim=1),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if symmetric:
        matrix.zeros = torch.full_like(matrix.zeros, 8)
    else:
        parts["weight_zero_point"] = packed(matrix.zeros, 4, dim=0)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT_GROUPS}
    torch.testing.assert_close(source_of(parts, settings).read("m.weight"), matrix.exact)


@pytest.mark.parametrize("scales", [torch.rand(ROWS, 1), torch.rand(1), torch.rand(ROWS, NUM_GROUPS)])
def test_plain_bytes_and_floats_of_compressed_tensors(scales: Tensor) -> None:
    values = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    wide = scales.reshape(-1, scales.shape[-1]).repeat_interleave(COLUMNS // scales.shape[-1], dim=1)
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": BYTE_GROUPS}
    source = source_of({"weight": values, "weight_scale": scales}, settings)
    torch.testing.assert_close(source.read("m.weight"), values.float() * wide)
    floats = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": FLOAT_GROUPS}
    source = source_of({"weight": floats, "weight_scale": scales, "input_scale": torch.ones(1)}, settings)
    assert set(source.names()) == {"m.weight"}
    torch.testing.assert_close(source.read("m.weight"), floats.float() * wide)


def test_a_gptq_checkpoint_answers_as_the_same_weights_written_out(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    dense = load_file(tmp_path / "model.safetensors")
    published = dict(dense)
    for seed, name in enumerate(sorted(n for n in dense if n.endswith("_proj.weight"))):
        matrix = Grouped(4, *dense[name].shape, seed=seed)
        dense[name] = matrix.exact.float()
        del published[name]
        prefix = name.removesuffix("weight")
        published |= {prefix + part: tensor for part, tensor in matrix.gptq().items()}
    prompts = [request([5, 17, 3, 80], 6), request(list(range(30)), 6)]
    save_file(dense, tmp_path / "model.safetensors")
    expected = Rig(executor_of(load(str(tmp_path)), 128)).answer(prompts)
    save_file(published, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Rig(executor_of(load(str(tmp_path)), 128)).answer(prompts) == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": INT_GROUPS},
            "4 bits",
        ),
    ],
)
def test_what_is_not_handled_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_packing(settings)


def test_parts_that_are_missing_or_do_not_fit_are_named() -> None:
    parts = Grouped(4).gptq()
    settings = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(InvalidCheckpoint, match=r"m\.scales"):
        source_of({name: part for name, part in parts.items() if name != "scales"}, settings).read("m.weight")
    with pytest.raises(InvalidCheckpoint, match="parts of m"):
        source_of(parts | {"g_idx": torch.full((COLUMNS,), 99, dtype=torch.int32)}, settings).read("m.weight")
