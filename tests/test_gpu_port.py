"""Sequences that move between pools on the GPU: bytes through the cell-copy kernels, and answers that go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Request, SamplingParams  # noqa: E402
from tests.cuda_rig import DEVICE, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from worker.cell_image import CellLayout  # noqa: E402
from worker.cuda.mover import CudaMover  # noqa: E402
from worker.kv_pool import KvPool, bytes_per_cell  # noqa: E402
from worker.pool_port import PoolPort, TorchMover  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_movers_read_and_write_the_same_bytes(dtype: torch.dtype) -> None:
    layout = CellLayout(4, 8, 128, str(dtype), bytes_per_cell(4, 8, 128, dtype))
    source, target = (KvPool(4, 3000, 8, 128, dtype, DEVICE) for _ in range(2))
    source.keys.normal_()
    source.values.normal_()
    order = np.random.default_rng(2).permutation(3000).astype(np.int32)
    cells, new_cells = order[:1500].copy(), order[1500:].copy()
    image = PoolPort(CudaMover(source), layout).export(cells)
    plain = PoolPort(TorchMover(source), layout).export(cells)
    assert np.array_equal(image.data, plain.data)
    PoolPort(CudaMover(target), layout).fill(new_cells, image)
    here, there = (torch.from_numpy(each).long().to(DEVICE) for each in (cells, new_cells))
    assert torch.equal(target.keys[:, there], source.keys[:, here])
    assert torch.equal(target.values[:, there], source.values[:, here])


def test_an_answer_goes_on_in_another_pool_that_has_grown_meanwhile() -> None:
    model = tiny_model()
    prompt = np.random.default_rng(8).integers(0, 203, size=40)
    asked = Request(prompt, 20, SamplingParams(seed=4))
    expected = Rig(torch_executor(model)).answer([asked])[0][0]
    pools = model.pool(512), model.pool(8)
    executors = [cuda_executor(model, num_cells=512, pool=pool) for pool in pools]
    first, second = (Rig(executor) for executor in executors)
    outgoing, incoming = (executor.port for executor in executors)
    assert outgoing is not None
    assert incoming is not None
    second.answer([Request(prompt[::-1].copy(), 3, SamplingParams(seed=1))])
    request_id = first.planner.submit(asked)
    said: list[int] = []
    while len(said) < 7:
        said += [token for update in first.turn() for token in update.tokens]
    held = first.planner.held(request_id)
    assert held is not None
    image = outgoing.export(held.cells)
    num_new = second.planner.receive(held.tokens.copy(), lambda start, new: incoming.fill(new, image.part(start)))
    assert pools[1].num_cells >= len(held.tokens)
    assert num_new == len(held.tokens)
    rest = Request(np.array([*prompt, *said]), 13, SamplingParams(seed=4), num_generated=len(said))
    assert second.answer([rest])[0][0] == expected[7:]
