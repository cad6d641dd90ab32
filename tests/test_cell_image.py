"""Sequences that move between pools: cells as plain bytes, refusals, and answers that go on at another worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import InvalidCellImage
from planner.planner import Planner
from planner.request import CellArray
from tests.fakes import fake_request
from tests.planner_life import new_life
from tests.tiny_models import greedy_answer, save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.cell_image import CellImage, CellLayout, CellPort
from worker.kv_pool import KvPool
from worker.pool_port import PoolPort, TorchMover

LAYOUT = CellLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="bfloat16", cell_bytes=2 * 3 * 2 * 4 * 2)


def pool_and_port(num_cells: int = 30) -> tuple[KvPool, PoolPort]:
    pool = KvPool(3, num_cells, 2, 4, torch.bfloat16, torch.device("cpu"))
    pool.keys.normal_()
    pool.values.normal_()
    return pool, PoolPort(TorchMover(pool), LAYOUT)


def cells(*numbers: int) -> CellArray:
    return np.array(numbers, np.int32)


def test_cells_arrive_in_another_pool_bytewise_and_no_others_change() -> None:
    (source, outgoing), (target, incoming) = pool_and_port(), pool_and_port(12)
    image = outgoing.export(cells(29, 3, 17))
    keys, values = target.keys.clone(), target.values.clone()
    incoming.fill(cells(5, 11, 0), image)
    for plane, before, sent in ((target.keys, keys, source.keys), (target.values, values, source.values)):
        before[:, [5, 11, 0]] = sent[:, [29, 3, 17]]
        assert torch.equal(plane, before)


def test_more_cells_than_one_piece_and_none_at_all() -> None:
    (source, outgoing), (target, incoming) = pool_and_port(2500), pool_and_port(2500)
    order = np.random.default_rng(0).permutation(2500).astype(np.int32)[:2100]
    incoming.fill(order[::-1].copy(), outgoing.export(order))
    assert torch.equal(target.keys[:, order[::-1].copy()], source.keys[:, order])
    incoming.fill(cells(), outgoing.export(cells()))


def test_the_rest_of_an_image_is_an_image() -> None:
    (source, outgoing), (target, incoming) = pool_and_port(), pool_and_port()
    incoming.fill(cells(7, 8), outgoing.export(cells(1, 2, 3, 4)).part(2))
    assert torch.equal(target.values[:, [7, 8]], source.values[:, [3, 4]])


@pytest.mark.parametrize(
    ("layout", "num_cells", "num_bytes", "told"),
    [
        (replace(LAYOUT, dtype="float16"), 2, 2 * LAYOUT.cell_bytes, "float16"),
        (LAYOUT, 3, 3 * LAYOUT.cell_bytes, "3 cells"),
        (LAYOUT, 2, 2 * LAYOUT.cell_bytes - 1, str(2 * LAYOUT.cell_bytes - 1)),
    ],
)
def test_an_image_that_does_not_fit_is_refused_with_the_numbers(
    layout: CellLayout, num_cells: int, num_bytes: int, told: str
) -> None:
    pool, port = pool_and_port()
    before = pool.keys.clone()
    with pytest.raises(InvalidCellImage, match=told):
        port.fill(cells(1, 2), CellImage(layout, num_cells, np.zeros(num_bytes, np.uint8)))
    assert torch.equal(pool.keys, before)


def moved(source: Planner, request_id: int, outgoing: CellPort, target: Planner, incoming: CellPort) -> int:
    held = source.held(request_id)
    assert held is not None
    tokens, image = held.tokens.copy(), outgoing.export(held.cells)
    return target.receive(tokens, lambda start, new: incoming.fill(new, image.part(start)))


def test_an_answer_goes_on_at_another_worker_without_computing_its_past_again(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    program = load(str(tmp_path))
    first, second = Rig(executor_of(program, 80)), Rig(executor_of(program, 90))
    outgoing, incoming = first.executor.port, second.executor.port
    assert outgoing is not None
    assert incoming is not None
    second.answer([request([9, 9, 9], 4)])
    prompt = list(range(5, 25))
    expected = greedy_answer(model, prompt, 12)
    request_id = first.planner.submit(request(prompt, 12))
    news = []
    for _ in range(5):
        news += first.turn()
    said = [token for update in news for token in update.tokens]
    assert said == expected[:5]
    assert moved(first.planner, request_id, outgoing, second.planner, incoming) == len(prompt) + 4
    second.planner.check()
    before = second.planner.metrics.num_tokens.total()
    assert second.answer([request([*prompt, *said], 7)]) == [[expected[5:]]]
    assert second.planner.metrics.num_tokens.total() - before == 7, "its past was computed again"


def test_what_is_resident_is_not_asked_for_and_what_has_no_room_is_not_taken() -> None:
    life = new_life(capacity=24)
    life.submit(fake_request(range(8), 1))
    life.finish()
    asked: list[tuple[int, int]] = []
    tokens = np.arange(12, dtype=np.int64)
    assert life.planner.receive(tokens, lambda start, new: asked.append((start, len(new)))) == 4
    assert life.planner.receive(tokens, lambda start, new: asked.append((start, len(new)))) == 0
    assert life.planner.receive(np.arange(50, 80), lambda start, new: asked.append((start, len(new)))) == 0
    assert asked == [(8, 4)]
    life.check()
    assert life.planner.snapshot().cached_cells == 12


def test_cells_that_could_not_be_filled_are_free_again() -> None:
    life = new_life(capacity=24)

    def fail(start: int, new: CellArray) -> None:
        raise InvalidCellImage("of another model")

    with pytest.raises(InvalidCellImage):
        life.planner.receive(np.arange(12, dtype=np.int64), fail)
    life.check()
    assert life.planner.snapshot().free_cells == 24


def test_only_a_running_sequence_holds_cells() -> None:
    life = new_life(max_num_seqs=1)
    life.submit(fake_request(range(8), 4))
    life.submit(fake_request(range(8), 4))
    assert life.planner.held(1) is None
    life.step()
    held = life.planner.held(1)
    assert held is not None
    assert held.tokens.tolist() == list(range(8))
    assert len(held.cells) == 8
    assert life.planner.held(2) is None
    assert life.planner.held(1, 3) is life.planner.held(7) is None
    life.finish()
