"""The products of adapters beside a matrix's, for rows together and alone, are what each row's own adapter gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from planner.request import Adapter
from tests.tiny_adapters import VARIANTS, save_tiny_adapter
from tests.tiny_models import save_tiny_model
from tests.torch_rig import chunk
from worker.batch import Batch, Piece
from worker.lora import LoraSlots
from worker.models.config import ModelConfig, read_config
from worker.models.lora import LoraMatrices, Site, site_shapes


class Loaded:
    """Slots with the eight kinds of adapters, and what was read of each."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.slots = LoraSlots(config, len(VARIANTS), 16, dtype, torch.device("cpu"))
        self.read: dict[Adapter, LoraMatrices] = {}
        for place, changes in enumerate(VARIANTS):
            saved = save_tiny_adapter(folder / str(place), config, place, changes=changes)
            self.load(place, saved)

    def load(self, slot: int, saved: Path) -> Adapter:
        matrices = self.slots.read(saved)
        adapter = Adapter(f"{slot}", matrices.revision)
        self.slots.put(slot, adapter, matrices)
        self.read[adapter] = matrices
        return adapter

    def check(self, lengths: list[int], adapters: list[Adapter | None]) -> None:
        """Of pieces with so many rows and these adapters, at every layer and site."""
        beside = self.slots.beside(batch_of(lengths, adapters))
        assert beside is not None
        torch.manual_seed(1)
        for layer in range(self.config.num_layers):
            for site, shape in site_shapes(self.config).items():
                x = torch.randn(sum(lengths), shape.num_inputs, dtype=self.dtype)
                product = torch.randn(len(x), shape.num_outputs, dtype=self.dtype)
                expected, row = product.double(), 0
                for length, adapter in zip(lengths, adapters, strict=True):
                    rows = slice(row, row + length)
                    expected[rows] += self._added(layer, site, x[rows].double(), adapter)
                    row += length
                beside.add(layer, site, x, product)
                tolerance = 1e-4 if self.dtype == torch.float32 else 0.3
                torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance)

    def _added(self, layer: int, site: Site, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        """By the definition: one part beside the other."""
        outputs = site_shapes(self.config)[site].outputs
        pairs = None if adapter is None else self.read[adapter].products.get((layer, site))
        parts = [
            torch.zeros(len(x), size).double() if pair is None else x @ pair.down.double().T @ pair.up.double()
            for pair, size in zip(pairs or [None] * len(outputs), outputs, strict=True)
        ]
        return torch.cat(parts, dim=1)


def batch_of(lengths: list[int], adapters: list[Adapter | None]) -> Batch:
    pieces, row = [], 0
    for index, (length, adapter) in enumerate(zip(lengths, adapters, strict=True)):
        tokens = list(range(length))
        pieces.append(Piece(index, chunk(tokens, tokens, adapter=adapter), row, 0, length))
        row += length
    zeros = np.zeros(row, np.int64)
    return Batch(tuple(pieces), zeros, zeros)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("rows")
    save_tiny_model("llama", folder / "model")
    return Loaded(folder, read_config(folder / "model"), request.param)


def test_lone_rows(loaded: Loaded) -> None:
    adapters = list(loaded.read)
    loaded.check([1], [adapters[5]])
    loaded.check([1] * 17, [*adapters, None, *reversed(adapters)])


def test_rows_together(loaded: Loaded) -> None:
    adapters = list(loaded.read)
    loaded.check([7], [adapters[0]])
    loaded.check([1, 5, 3, 2, 9], [adapters[5], None, adapters[7], adapters[5], adapters[2]])


def test_rows_without_an_adapter_ask_for_nothing(loaded: Loaded) -> None:
    assert loaded.slots.beside(batch_of([1, 4], [None, None])) is None


def test_a_slot_that_is_filled_anew_has_nothing_of_the_adapter_before(loaded: Loaded, tmp_path: Path) -> None:
    before = next(adapter for adapter in loaded.read if adapter.name == "5")
    loaded.slots.drop(before)
    narrow = save_tiny_adapter(tmp_path / "narrow", loaded.config, 99, changes={"target_modules": ["o_proj"], "r": 1})
    after = loaded.load(5, narrow)
    loaded.check([1, 1], [after, None])
    loaded.check([3], [after])
    loaded.slots.drop(after)
    loaded.slots.put(5, before, loaded.read[before])
    loaded.check([1, 2], [before, before])
