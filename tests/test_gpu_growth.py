"""Growth of the pool on the GPU: answers stay the same while it grows under running sequences, graphs are captured
again each time and never else, and where there is no memory only those end that need it. Also in Triton's
interpreter."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.errors import ForwardFailed  # noqa: E402
from planner.request import FinishReason, Request, SamplingParams  # noqa: E402
from planner.slices import Method, Slice  # noqa: E402
from planner.step import ChunkOutput, Step, SwapIn  # noqa: E402
from tests.cuda_rig import Captures, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from worker.cuda.graphs import capture_stream, captures  # noqa: E402
from worker.cuda.warm_up import trial_chunks  # noqa: E402
from worker.kv_pool import KvPool  # noqa: E402

NUM_TOKENS = 6 if INTERPRETED else 30


def requests(count: int, seed: int = 3) -> list[Request]:
    draw = np.random.default_rng(seed)
    samplings = (SamplingParams(temperature=0.0), SamplingParams(seed=5))
    return [Request(draw.integers(0, 203, size=6 + 5 * i), NUM_TOKENS, samplings[i % 2]) for i in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_of_a_pool_that_is_large_from_the_start(depth: int) -> None:
    model = tiny_model()
    asked = requests(2 if INTERPRETED else 6)
    expected = Rig(torch_executor(model)).answer_alone(asked)
    captures = Captures()
    executor = cuda_executor(model, num_cells=512, pool=model.pool(8), captures=captures, captured_widths=(8, 32))
    rig = Rig(executor, depth=depth, prefix_caching=False)
    first = rig.answer(asked)
    num_captures = captures.count
    assert first == expected
    assert num_captures > 2, "it grew more than once"
    assert rig.answer(asked) == expected
    assert captures.count == num_captures, "captured again without a growth"


def test_swapped_sequences_come_back_into_a_pool_that_has_moved() -> None:
    model = tiny_model()
    asked = requests(3 if INTERPRETED else 6, seed=4)
    expected = Rig(torch_executor(model)).answer_alone(asked)
    total = sum(len(each.prompt) + NUM_TOKENS for each in asked)
    executor = cuda_executor(model, num_cells=total // 2, pool=model.pool(16), swap_blocks=64)
    rig = Rig(executor, depth=2, min_swapped_cells=4, prefix_caching=False)
    assert rig.answer(asked) == expected
    assert rig.planner.metrics.num_swapped_in > 0


@pytest.mark.skipif(INTERPRETED, reason="captures graphs")
def test_a_pool_grows_behind_a_captured_prefill_whose_rows_narrower_ones_have_not() -> None:
    model = tiny_model()
    prompt = Request(np.arange(30), NUM_TOKENS, SamplingParams(temperature=0.0))
    expected = Rig(torch_executor(model)).answer([prompt])
    executor = cuda_executor(model, num_cells=512, pool=model.pool(40), captured_widths=(8, 32))
    assert Rig(executor, prefix_caching=False).answer([prompt]) == expected


@pytest.mark.skipif(INTERPRETED, reason="captures graphs")
def test_memory_may_be_pinned_on_another_thread_while_steps_are_captured() -> None:
    """As adapters' is, while a pool grows: neither the thread nor the graph is to notice."""
    x, done, faults = torch.zeros(64, device="cuda"), threading.Event(), list[RuntimeError]()

    def pin() -> None:
        held: list[torch.Tensor] = []  # else the same memory would be given out again, without asking the driver
        while not done.is_set() and not faults:
            try:
                held.append(torch.zeros(4096, pin_memory=True))
            except RuntimeError as error:
                faults.append(error)
            if len(held) == 4096:
                held.clear()

    def count_to_300() -> torch.Tensor:
        total = x
        for _ in range(300):
            total = total + 1
        return total

    pinning = threading.Thread(target=pin)
    pinning.start()
    try:
        capture = captures()
        replays = [capture(count_to_300) for _ in range(10)]
    finally:
        done.set()
        pinning.join()
    assert not faults
    assert all((replay() == 300).all() for replay in replays)


@pytest.mark.skipif(INTERPRETED, reason="captures graphs")
def test_graphs_that_nobody_can_reach_any_more_are_not_destroyed_inside_a_capture() -> None:
    """As of an engine that failed, whose parts hold each other: the collector may come by at any time."""
    x = torch.zeros(64, device="cuda")

    def leave_garbage() -> None:
        capture = captures()
        held: list[object] = [capture(lambda: x + 1)]
        held.append(held)

    def allocate() -> torch.Tensor:
        kept = [[place] for place in range(5000)]
        return x + len(kept)

    before = gc.get_threshold()
    try:
        for _ in range(3):
            gc.disable()
            leave_garbage()
            gc.enable()
            gc.set_threshold(1500, 1, 1)
            assert (captures()(allocate)() == 5000).all()
            gc.set_threshold(*before)
    finally:
        gc.enable()
        gc.set_threshold(*before)


@pytest.mark.skipif(INTERPRETED, reason="captures graphs")
def test_capturing_again_on_one_stream_takes_no_more_memory() -> None:
    """The vendor's library keeps work space of its own for each stream that it has seen."""
    x, matrix = (torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda") for rows in (200, 4096))
    stream, taken = capture_stream(), []
    for _ in range(4):
        capture = captures(stream)
        replay = capture(lambda: x @ matrix)
        replay()
        del capture, replay
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert taken == [taken[0]] * 4


class CrampedPool(KvPool):
    """Has no memory for anything larger, while `is_full`."""

    is_full = False

    def grow(self, num_cells: int) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError("no room for it")
        super().grow(num_cells)


def test_where_the_pool_cannot_grow_only_those_end_that_need_it() -> None:
    model = tiny_model()
    draw = np.random.default_rng(6)
    first, second = (Request(draw.integers(0, 203, size=n), NUM_TOKENS, SamplingParams(seed=n)) for n in (6, 60))
    expected = Rig(torch_executor(model)).answer_alone([first, second])
    pool = model.pool(len(first.prompt) + NUM_TOKENS, CrampedPool)
    executor = cuda_executor(model, num_cells=256, pool=pool)
    rig = Rig(executor, prefix_caching=False)
    assert isinstance(pool, CrampedPool)
    pool.is_full = True
    news = rig.updates([first, second])
    assert [token for update in news[0] for token in update.tokens] == expected[0][0]
    assert news[1][-1].finish_reason is FinishReason.FAILED
    assert isinstance(news[1][-1].error, ForwardFailed)
    pool.is_full = False
    assert rig.answer([first, second]) == expected


def test_what_came_back_in_no_cells_of_its_own_needs_none_where_the_pool_cannot_grow() -> None:
    """All of a preempted sequence may be resident again before its copy is read."""
    model = tiny_model()
    pool = model.pool(8, CrampedPool)
    assert isinstance(pool, CrampedPool)
    pool.is_full = True
    executor = cuda_executor(model, num_cells=256, pool=pool, swap_blocks=4)
    nothing = np.empty(0, np.int32)
    executor.launch(
        Step(1, trial_chunks([4, 10]), (Slice(0, 14, Method.PREFILL),), swaps_in=(SwapIn(7, nothing, nothing),))
    )
    fits, beyond = executor.collect().outcomes
    assert isinstance(fits, ChunkOutput)
    assert isinstance(beyond, ForwardFailed)
