"""Cell copies against plain torch, in numba's simulator everywhere and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")

from worker.cuda.device_words import SIMULATED
from worker.kernels import CellCopier, widest_word

ON_GPU = torch.cuda.is_available() and not SIMULATED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_kernels = pytest.mark.skipif(
    not (SIMULATED or ON_GPU), reason="kernels need a GPU, or the simulator that another test here starts"
)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

# Shape of a plane and dtype; the bytes of a row make words of 16, 8, 4, 2 and 1 bytes.
POOLS = {
    16: ((9, 2, 24), torch.bfloat16),
    8: ((9, 1, 10), torch.float32),
    4: ((9, 3, 3), torch.float32),
    2: ((9, 1, 5), torch.float16),
    1: ((9, 7, 3), torch.uint8),
}


def make_planes(shape: tuple[int, ...], dtype: torch.dtype, num_planes: int = 4) -> list[Tensor]:
    """Planes that are allocations of their own, in no order of addresses."""
    planes = [torch.randint(0, 250, shape).to(dtype).to(DEVICE) for _ in range(num_planes)]
    return planes[::-1]


def indices(*cells: int) -> Tensor:
    return torch.tensor(cells, dtype=torch.int32, device=DEVICE)


def gathered(planes: list[Tensor], cells: Tensor) -> Tensor:
    """The oracle: uint8[planes, cells, row bytes]."""
    return torch.stack([plane[cells.long()].view(torch.uint8).reshape(len(cells), -1) for plane in planes])


def in_buffer(copier: CellCopier, storage: Tensor, num_cells: int) -> Tensor:
    used = storage[: copier.num_planes * num_cells * copier.row_bytes]
    return used.view(copier.num_planes, num_cells, copier.row_bytes)


@pytest.mark.skipif(SIMULATED, reason="is itself what the simulator runs")
def test_the_kernels_pass_these_tests_in_the_simulator() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", str(Path(__file__))]
    done = subprocess.run(
        command, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("sizes", "width"), [((2048, 64), 16), ((40, 512), 8), ((36, 512), 4), ((10, 64), 2), ((21,), 1)]
)
def test_the_widest_word_that_fits_is_chosen(sizes: tuple[int, ...], width: int) -> None:
    assert widest_word(*sizes) == width


@needs_kernels
@pytest.mark.parametrize("width", POOLS)
def test_gathering_packs_the_cells_of_every_plane(width: int) -> None:
    planes = make_planes(*POOLS[width])
    copier = CellCopier(planes)
    cells = indices(7, 0, 3, 8, 4)
    packed = copier.buffer(6)
    packed.storage.fill_(255)
    copier.gather(cells, packed)
    assert torch.equal(in_buffer(copier, packed.storage, 5), gathered(planes, cells))
    assert (packed.storage[copier.num_planes * 5 * copier.row_bytes :] == 255).all()


@needs_kernels
@pytest.mark.parametrize("width", POOLS)
def test_scattering_fills_its_cells_and_leaves_the_others(width: int) -> None:
    planes = make_planes(*POOLS[width])
    expected = [plane.clone() for plane in planes]
    copier = CellCopier(planes)
    packed = copier.buffer(3)
    copier.gather(indices(7, 0, 3), packed)
    copier.scatter(packed, indices(1, 7, 8))
    for plane, before in zip(planes, expected, strict=True):
        before[[1, 7, 8]] = before[[7, 0, 3]]
        assert torch.equal(plane, before)


@needs_kernels
@pytest.mark.parametrize("width", POOLS)
def test_blocks_lie_one_after_the_other_and_the_last_may_be_short(width: int) -> None:
    planes = make_planes(*POOLS[width])
    expected = [plane.clone() for plane in planes]
    copier = CellCopier(planes)
    cells, packed = indices(7, 0, 3, 8, 4), copier.buffer(6)
    copier.gather(cells, packed, block_cells=2)
    at = 0
    for block in cells.split(2):
        size = copier.num_planes * len(block) * copier.row_bytes
        assert torch.equal(in_buffer(copier, packed.storage[at:], len(block)), gathered(planes, block))
        at += size
    copier.scatter(packed, indices(1, 2, 5, 6, 0), block_cells=2)
    for plane, before in zip(planes, expected, strict=True):
        before[[1, 2, 5, 6, 0]] = before[[7, 0, 3, 8, 4]]
        assert torch.equal(plane, before)


@needs_kernels
@pytest.mark.parametrize("width", POOLS)
def test_copying_within_the_pool_leaves_all_but_the_targets(width: int) -> None:
    planes = make_planes(*POOLS[width])
    expected = [plane.clone() for plane in planes]
    CellCopier(planes).copy(indices(2, 2, 6), indices(0, 5, 8))
    for plane, before in zip(planes, expected, strict=True):
        before[[0, 5, 8]] = before[[2, 2, 6]]
        assert torch.equal(plane, before)


@needs_kernels
def test_a_row_longer_than_one_round_of_its_lanes_is_moved_whole() -> None:
    planes = make_planes((3, 8, 129), torch.float32, num_planes=2)
    copier = CellCopier(planes)
    packed = copier.buffer(2)
    copier.gather(indices(2, 1), packed)
    assert torch.equal(in_buffer(copier, packed.storage, 2), gathered(planes, indices(2, 1)))


@needs_kernels
def test_no_cells_is_nothing_to_do() -> None:
    planes = make_planes(*POOLS[16])
    expected = [plane.clone() for plane in planes]
    CellCopier(planes).copy(indices(), indices())
    assert all(torch.equal(plane, before) for plane, before in zip(planes, expected, strict=True))


@needs_kernels
def test_the_oracle_sees_one_wrong_cell() -> None:
    planes = make_planes(*POOLS[16])
    copier = CellCopier(planes)
    packed = copier.buffer(3)
    copier.gather(indices(7, 0, 4), packed)
    assert not torch.equal(in_buffer(copier, packed.storage, 3), gathered(planes, indices(7, 0, 3)))


@pytest.mark.skipif(not SIMULATED, reason="indices are checked on the host only")
def test_a_cell_outside_the_pool_is_the_callers_error() -> None:
    copier = CellCopier(make_planes(*POOLS[16]))
    with pytest.raises(AssertionError):
        copier.copy(indices(0), indices(9))
    with pytest.raises(AssertionError):
        copier.copy(indices(-1), indices(3))


def real_planes(num_cells: int) -> list[Tensor]:
    """Four layers of an 8B model."""
    shape = (num_cells, 8, 128)
    return [torch.randn(shape, dtype=torch.float32, device=DEVICE).bfloat16() for _ in range(8)]


@needs_gpu
@pytest.mark.gpu
def test_real_rows_survive_the_round_trip_through_a_buffer() -> None:
    planes = real_planes(20_000)
    copier = CellCopier(planes)
    order = torch.randperm(20_000, device=DEVICE).int()
    source, target = order[:4096].contiguous(), order[4096:8192].contiguous()
    packed = copier.buffer(4096)
    copier.gather(source, packed)
    assert torch.equal(in_buffer(copier, packed.storage, 4096), gathered(planes, source))
    copier.scatter(packed, target)
    assert torch.equal(gathered(planes, target), gathered(planes, source))


@needs_gpu
@pytest.mark.gpu
def test_a_captured_graph_copies_the_cells_that_its_lists_name_at_replay() -> None:
    planes = real_planes(64)
    copier = CellCopier(planes)
    source, target = indices(0, 1, 2), indices(10, 11, 12)
    copier.copy(source, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copier.copy(source, target)
    source.copy_(indices(5, 6, 7))
    target.copy_(indices(20, 30, 40))
    graph.replay()
    assert torch.equal(gathered(planes, target), gathered(planes, source))
