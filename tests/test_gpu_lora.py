"""Adapters on a GPU in float32: each sequence's answer is what its adapter, merged into the weights, gives alone.

In whatever batch, chunk, width, fork or preemption, with captured steps and without, and while others are loaded. Runs
on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Adapter, Request, SamplingParams  # noqa: E402
from tests.cuda_rig import DEVICE, Captures, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from tests.fp8_oracle import adapted_fp8, plain_fp8, without_values  # noqa: E402
from tests.lora_rig import merged_weights, random_matrices  # noqa: E402
from tests.test_decode_chain import ONE_SPLIT, split_k  # noqa: E402
from tests.test_gpu_packed import plain, with_weights  # noqa: E402
from worker.cell_rows import SCALED  # noqa: E402
from worker.config import Quantization  # noqa: E402
from worker.cuda.decode import Capture  # noqa: E402
from worker.cuda.decode_plan import DecodePlan  # noqa: E402
from worker.cuda.decode_shape import DecodeShape  # noqa: E402
from worker.cuda.executor import CudaExecutor  # noqa: E402
from worker.cuda.fp8 import fp8_weights  # noqa: E402
from worker.cuda.graphs import Draw, LaunchedSteps  # noqa: E402
from worker.cuda.lora import CudaLoraSlots  # noqa: E402
from worker.cuda.packed import PACKED, pack_weights  # noqa: E402
from worker.models.lora import LoraMatrices  # noqa: E402

NUM_TOKENS = 3 if INTERPRETED else 12
NUM_ADAPTERS = 4 if INTERPRETED else 8
LENGTHS = (1, 3, 17, 2, 9) if INTERPRETED else (1, 3, 17, 40, 33, 65, 9, 5, 21)
"""Of prompts: one for each adapter, and one without any."""
RANKS = ((4,), (8, 1), (0, 3, 2), (2, 0), (16,), (1,), (5, 7), (3, 0, 0))
MAX_RANK = 16
GREEDY = SamplingParams(temperature=0.0)


def merged(model: Model, matrices: LoraMatrices) -> Model:
    return with_weights(model, merged_weights(model.decoder.config, model.decoder.weights, matrices))


@dataclass(frozen=True)
class Adapted:
    """A model, its adapters, a request without any and one with each, and what they answer when merged and alone."""

    model: Model
    matrices: list[LoraMatrices]
    requests: list[Request]
    expected: list[list[list[int]]]

    def slots(self) -> CudaLoraSlots:
        decoder = self.model.decoder
        return CudaLoraSlots(decoder.config, NUM_ADAPTERS, MAX_RANK, decoder.dtype, DEVICE)

    def load(self, slots: CudaLoraSlots, place: int) -> None:
        """Into slots that are not in the adapters' order."""
        adapter = self.requests[place + 1].adapter
        assert adapter is not None
        slots.put((place + 3) % NUM_ADAPTERS, adapter, slots.packed(self.matrices[place]))

    def executor(self, captures: Capture | None = None, num_cells: int = 1024, **changes: Any) -> CudaExecutor:
        """With all adapters loaded, and a captured prefill of one width unless told otherwise."""
        slots = self.slots()
        for place in range(NUM_ADAPTERS):
            self.load(slots, place)
        settings: dict[str, Any] = {"captured_widths": (16,), "widths": (1, 2, 4, 8, 16)}
        return cuda_executor(
            self.model, num_cells, adapters=slots, captures=captures or Captures(), **(settings | changes)
        )


def adapted_model(name: str) -> Adapted:
    model = tiny_model(name)
    config = model.decoder.config
    matrices = [
        random_matrices(config, seed, RANKS[seed], layers=1 + seed % 2, strength=0.5) for seed in range(NUM_ADAPTERS)
    ]
    draw = np.random.default_rng(5)
    requests, expected = [], []
    for place, each in enumerate([None, *matrices]):
        prompt = draw.integers(0, config.vocab_size, size=LENGTHS[place])
        adapter = None if each is None else Adapter(f"adapter {place}", 100 + place)
        requests.append(Request(prompt, NUM_TOKENS, GREEDY, adapter=adapter))
        alone = replace(requests[-1], adapter=None)
        expected += Rig(torch_executor(model if each is None else merged(model, each))).answer([alone])
    return Adapted(model, matrices, requests, expected)


@pytest.fixture(scope="module", params=["qwen3"] if INTERPRETED else ["qwen3", "llama"])
def adapted(request: pytest.FixtureRequest) -> Adapted:
    return adapted_model(request.param)


def test_the_adapters_say_something_else_than_the_model(adapted: Adapted) -> None:
    """Else the other tests could not fail."""
    plain = Rig(torch_executor(adapted.model)).answer([replace(each, adapter=None) for each in adapted.requests])
    differs = [said != other for said, other in zip(plain[1:], adapted.expected[1:], strict=True)]
    assert sum(differs) >= NUM_ADAPTERS - 1, differs


@pytest.mark.parametrize("depth", [1, 2])
def test_all_adapters_and_none_in_one_batch(adapted: Adapted, depth: int) -> None:
    rig = Rig(adapted.executor(), depth=depth, max_num_seqs=16)
    assert rig.answer(adapted.requests) == adapted.expected
    assert any(len(step.chunks) == len(adapted.requests) for step in rig.steps), "they never ran together"


def test_each_alone_and_without_one_after_one_with(adapted: Adapted) -> None:
    """What a graph read of an adapter before must not show."""
    asked = [adapted.requests[1], adapted.requests[0], *adapted.requests[2:]]
    expected = [adapted.expected[1], adapted.expected[0], *adapted.expected[2:]]
    assert Rig(adapted.executor()).answer_alone(asked) == expected


def test_chunks_of_prompts_beside_decodes(adapted: Adapted) -> None:
    rig = Rig(adapted.executor(), depth=2, max_num_seqs=16, prefill_chunk_tokens=4, max_batched_tokens=24)
    assert rig.answer(adapted.requests) == adapted.expected


def test_prefills_that_are_launched_and_steps_without_graphs(adapted: Adapted) -> None:
    executor = adapted.executor(captures=LaunchedSteps, captured_widths=())
    assert Rig(executor, depth=2, max_num_seqs=16).answer(adapted.requests) == adapted.expected


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8])
def test_every_number_of_rows(adapted: Adapted, num_rows: int) -> None:
    if INTERPRETED and num_rows not in (3, 4):
        pytest.skip("too long for the interpreter")
    asked = (adapted.requests * 2)[1 : num_rows + 1]
    expected = (adapted.expected * 2)[1 : num_rows + 1]
    assert Rig(adapted.executor(), depth=2).answer(asked) == expected


def test_draws_and_penalties_are_those_of_the_merged_model(adapted: Adapted) -> None:
    samplings = [
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=1.1, seed=7, top_p=0.9, top_k=20),
    ]
    asked, expected = [], []
    for place, sampling in enumerate(samplings):
        request = replace(adapted.requests[place + 1], sampling=sampling)
        asked.append(request)
        alone = replace(request, adapter=None)
        expected += Rig(torch_executor(merged(adapted.model, adapted.matrices[place]))).answer([alone])
    asked.append(adapted.requests[0])
    expected.append(adapted.expected[0])
    assert Rig(adapted.executor(), depth=2).answer(asked) == expected


def test_forks_and_preemption(adapted: Adapted) -> None:
    forked = [replace(each, n=2) for each in adapted.requests]
    expected = [answer * 2 for answer in adapted.expected]
    num_cells = sum(len(each.prompt) + NUM_TOKENS for each in adapted.requests)
    assert Rig(adapted.executor(num_cells=num_cells), depth=2, max_num_seqs=16).answer(forked) == expected


def test_a_pool_that_grows_beneath_them(adapted: Adapted) -> None:
    captures = Captures()
    executor = adapted.executor(captures, num_cells=512, pool=adapted.model.pool(16))
    assert Rig(executor, depth=2, max_num_seqs=16, prefix_caching=False).answer(adapted.requests) == adapted.expected
    assert captures.count > 1, "it never grew"


def test_products_that_were_cut_into_parts(adapted: Adapted) -> None:
    """The chain that leaves partial sums has one more of them."""

    def plan(shape: DecodeShape, width: int) -> DecodePlan:
        return replace(split_k(ONE_SPLIT, swap=False), width=width)

    executor = adapted.executor(plan=plan, widths=(1, 2, 8))
    assert Rig(executor, depth=2).answer(adapted.requests[:3]) == adapted.expected[:3]


@pytest.mark.parametrize("quantization", PACKED)
def test_beside_matrices_of_eight_and_four_bits(adapted: Adapted, quantization: Quantization) -> None:
    decoder, matrices = adapted.model.decoder, adapted.matrices
    packed = pack_weights(decoder.weights, quantization)
    quantized = with_weights(adapted.model, packed)
    expected = []
    for place, request in enumerate(adapted.requests[:3]):
        weights = plain(packed)
        if place:
            weights = merged_weights(decoder.config, weights, matrices[place - 1])
        model = with_weights(adapted.model, weights)
        expected += Rig(torch_executor(model)).answer([replace(request, adapter=None)])
    executor = replace(adapted, model=quantized).executor()
    assert Rig(executor, depth=2).answer(adapted.requests[:3]) == expected


@pytest.mark.skipif(not INTERPRETED, reason="float32 has no vendor's product of fp8")
def test_beside_products_of_fp8(adapted: Adapted) -> None:
    """What adapters add takes x before it is rounded."""
    decoder, matrices = adapted.model.decoder, adapted.matrices
    rounded, nothing = fp8_weights(decoder.weights), without_values(decoder.weights)
    expected = []
    for place, request in enumerate(adapted.requests[:3]):
        weights = plain_fp8(rounded)
        if place:
            weights = adapted_fp8(rounded, merged_weights(decoder.config, nothing, matrices[place - 1]))
        oracle = torch_executor(with_weights(adapted.model, weights))
        expected += Rig(oracle).answer([replace(request, adapter=None)])
    executor = replace(adapted, model=with_weights(adapted.model, rounded)).executor()
    assert Rig(executor, depth=2).answer(adapted.requests[:3]) == expected


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("name", ["qwen2", "biased"])
def test_biases_and_sizes_that_no_tile_divides(name: str) -> None:
    adapted = adapted_model(name)
    assert Rig(adapted.executor(), depth=2, max_num_seqs=16).answer(adapted.requests) == adapted.expected


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
def test_more_rows_than_have_programs_of_their_own(adapted: Adapted) -> None:
    executor = adapted.executor(num_cells=8192, widths=(1, 64), captured_widths=(16, 256), max_prefill_tokens=2048)
    rig = Rig(executor, depth=2, max_num_seqs=64, max_batched_tokens=2048, prefill_chunk_tokens=256)
    assert rig.answer(adapted.requests * 7) == adapted.expected * 7


def test_an_adapter_that_comes_while_others_run_and_one_that_takes_its_slot(adapted: Adapted) -> None:
    """Nothing is captured again; those that run say what they would have said."""
    slots, captures = adapted.slots(), Captures()
    executor = cuda_executor(
        adapted.model, adapters=slots, captures=captures, captured_widths=(16,), widths=(1, 2, 4, 8)
    )
    num_captures = captures.count
    adapted.load(slots, 0)
    rig = Rig(executor, prefix_caching=False)
    said: dict[int, list[int]] = {}

    def run(turns: int | None) -> None:
        while rig.planner.has_work and turns != 0:
            for update in rig.turn():
                said.setdefault(update.request_id, []).extend(update.tokens)
            turns = None if turns is None else turns - 1

    first = [rig.planner.submit(adapted.requests[place]) for place in (0, 1)]
    run(2)
    adapted.load(slots, 1)
    second = rig.planner.submit(adapted.requests[2])
    run(None)
    assert [said[key] for key in (*first, second)] == [answer[0] for answer in adapted.expected[:3]]
    for place in (1, 2):
        adapter = adapted.requests[place].adapter
        assert adapter is not None
        slots.drop(adapter)
    third = adapted.requests[4].adapter
    assert third is not None
    slots.put(3 % NUM_ADAPTERS, third, slots.packed(adapted.matrices[3]))  # where the first one was
    assert rig.answer([adapted.requests[4], adapted.requests[0]]) == [adapted.expected[4], adapted.expected[0]]
    assert captures.count == num_captures, "steps were captured again"


def test_steps_without_adapters_run_what_an_engine_without_them_runs(adapted: Adapted) -> None:
    kinds: list[Draw] = []

    class Watched(LaunchedSteps):
        def replay(self, width: int, draw: Draw) -> None:
            kinds.append(draw)
            super().replay(width, draw)

    executor = adapted.executor(captures=Watched)
    rig = Rig(executor)
    assert rig.answer([adapted.requests[0]]) == adapted.expected[:1]
    assert kinds
    assert set(kinds) == {Draw.GREEDY}
    assert rig.answer([adapted.requests[1]]) == adapted.expected[1:2]
    assert kinds[-1] is Draw.ADAPTED_GREEDY


def test_cells_of_eight_bits(adapted: Adapted) -> None:
    """Keys and values that adapters made are kept as any others. Sums in another order may round one of them to its
    neighbour, 6% away, and two tokens that are almost as likely then change places: once is not too often."""
    expected = []
    for place, request in enumerate(adapted.requests):
        model = merged(adapted.model, adapted.matrices[place - 1]) if place else adapted.model
        expected += Rig(cuda_executor(model, cell_dtype=SCALED)).answer([replace(request, adapter=None)])
    answers = Rig(adapted.executor(cell_dtype=SCALED), depth=2, max_num_seqs=16).answer(adapted.requests)
    assert sum(said == other for said, other in zip(answers, expected, strict=True)) >= len(answers) - 1
