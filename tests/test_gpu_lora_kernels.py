"""What adapters add to products on the GPU is, row by row, what float64 says of each row's own adapter.

Runs on a GPU, or without one in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_lora_kernels.py
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Adapter  # noqa: E402
from tests.cuda_rig import LLAMA  # noqa: E402
from tests.lora_rig import random_matrices  # noqa: E402
from worker.cuda.lora import FEW_ROWS, CudaLoraSlots  # noqa: E402
from worker.models.config import ModelConfig  # noqa: E402
from worker.models.lora import LoraMatrices, Site, site_shapes  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Sizes that are no powers of two, and heads of which there are fewer of keys than of queries.
ODD = replace(LLAMA, hidden_size=72, intermediate_size=136, num_heads=5, num_kv_heads=1, head_dim=24, num_layers=2)
WIDE = replace(LLAMA, hidden_size=2560, intermediate_size=3072, num_heads=20, num_kv_heads=4, head_dim=128)
# The interpreter multiplies bfloat16 matrices wrongly.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
MOST_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Loaded:
    """Slots with these adapters, the last slot first, and what each adds by the definition."""

    def __init__(self, config: ModelConfig, max_rank: int, dtype: torch.dtype, each: list[LoraMatrices]) -> None:
        self.config, self.dtype, self.each = config, dtype, each
        self.slots = CudaLoraSlots(config, len(each), max_rank, dtype, DEVICE)
        for place, matrices in enumerate(each):
            self.put(place, matrices)

    def put(self, place: int, matrices: LoraMatrices) -> None:
        adapter = Adapter(str(place), matrices.revision)
        self.slots.put(len(self.each) - 1 - place, adapter, self.slots.packed(matrices))
        self.each[place] = matrices

    def adapter(self, place: int) -> Adapter:
        return Adapter(str(place), self.each[place].revision)

    def check(self, places: list[int | None]) -> None:
        """Of rows with the adapters at these places, at every layer and site."""
        row_slots = self.slots.slots_of([None if place is None else self.adapter(place) for place in places])
        beside = self.slots.beside(torch.tensor(row_slots, dtype=torch.int32, device=DEVICE))
        without = [row for row, place in enumerate(places) if place is None]
        generator = torch.Generator(device=DEVICE).manual_seed(len(places))
        for layer in range(self.config.num_layers):
            for site, shape in site_shapes(self.config).items():

                def random(columns: int) -> Tensor:
                    values = torch.randn(len(places), columns, generator=generator, device=DEVICE)
                    return values.to(self.dtype)

                x, before = random(shape.num_inputs), random(shape.num_outputs)
                product = before.clone()
                beside.add(layer, site, x, product)
                expected = before.double() + self._added(layer, site, x.double(), places)
                error, told = MOST_ERROR[self.dtype], f"{site} of layer {layer}: {{}}".format
                torch.testing.assert_close(product.double(), expected, rtol=error, atol=error * 4, msg=told)
                assert torch.equal(product[without], before[without]), (layer, site)

    def _added(self, layer: int, site: Site, x: Tensor, places: list[int | None]) -> Tensor:
        """float64, by the definition: one part beside the other, for the rows of each adapter."""
        outputs = site_shapes(self.config)[site].outputs
        added = x.new_zeros(len(places), sum(outputs))
        for place in {place for place in places if place is not None}:
            rows = [row for row, other in enumerate(places) if other == place]
            for part, pair in enumerate(self.each[place].products.get((layer, site), ())):
                if pair is not None:
                    down, up = (matrix.to(DEVICE, self.dtype).double() for matrix in (pair.down, pair.up))
                    first = sum(outputs[:part])
                    added[rows, first : first + outputs[part]] = x[rows] @ down.T @ up
        return added


def mixed(num_rows: int, num_places: int, seed: int = 3) -> list[int | None]:
    """Runs of rows of one adapter or none, of any length."""
    draw, places = np.random.default_rng(seed), list[int | None]()
    while len(places) < num_rows:
        place = int(draw.integers(-1, num_places))
        places += [None if place < 0 else place] * int(draw.choice([1, 1, 2, 7, 20]))
    return places[:num_rows]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, FEW_ROWS, FEW_ROWS + 1, 70])
def test_rows_of_several_adapters_and_of_none(num_rows: int, dtype: torch.dtype) -> None:
    ranks: list[tuple[int, ...]] = [(5,), (16, 1), (3, 0, 7), (0, 2)]
    loaded = Loaded(ODD, 16, dtype, [random_matrices(ODD, 7 + i, each, layers=2) for i, each in enumerate(ranks)])
    loaded.check(mixed(num_rows, len(ranks)))


def test_rows_of_one_adapter_and_of_none_at_all() -> None:
    loaded = Loaded(ODD, 8, torch.float32, [random_matrices(ODD, 3, (8,), layers=2)])
    for num_rows in (1, FEW_ROWS + 9):
        loaded.check([0] * num_rows)
        loaded.check([None] * num_rows)


@pytest.mark.parametrize("max_rank", [1, 3, 40])
def test_ranks_that_are_no_powers_of_two_and_narrower_than_the_room(max_rank: int) -> None:
    each = [random_matrices(ODD, 5, (max_rank,), layers=2), random_matrices(ODD, 6, (1,), layers=1)]
    loaded = Loaded(ODD, max_rank, torch.float32, each)
    loaded.check(mixed(5, 2))
    loaded.check(mixed(FEW_ROWS + 2, 2))


def test_more_slots_than_are_looked_through_at_once() -> None:
    each = [random_matrices(ODD, place, (2,), layers=1) for place in range(11)]
    Loaded(ODD, 2, torch.float32, each).check(mixed(FEW_ROWS + 20, 11))


def test_a_slot_that_is_filled_anew_has_nothing_of_the_adapter_before() -> None:
    loaded = Loaded(ODD, 8, torch.float32, [random_matrices(ODD, 3, (8,), layers=2)])
    for matrices in (random_matrices(ODD, 4, (0, 2), layers=1), LoraMatrices(9, {})):
        loaded.slots.drop(loaded.adapter(0))
        loaded.put(0, matrices)
        loaded.check([0, None, 0])
        loaded.check([0] * (FEW_ROWS + 1))


def test_inputs_that_are_cut_into_stretches() -> None:
    # Four parts of four stretches of 256 each, and a bit.
    deep = replace(ODD, hidden_size=4100, intermediate_size=40, num_layers=1, windows=(None,))
    each = [random_matrices(deep, place, (3, 16), layers=1) for place in range(2)]
    Loaded(deep, 16, torch.float32, each).check(mixed(FEW_ROWS + 3, 2))


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("num_rows", [6, 200, 1500, 5000])
def test_a_large_models_sizes(num_rows: int) -> None:
    each = [random_matrices(WIDE, place, (16, 64), layers=2) for place in range(3)]
    Loaded(WIDE, 64, torch.bfloat16, each).check(mixed(num_rows, 3))
