"""Eight adapters in one batch say what each of them says when it is merged into the weights, in float32."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from planner.request import Adapter, Request
from tests.tiny_adapters import VARIANTS, save_merged, save_tiny_adapter
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.lora import LoraSlots
from worker.models.config import read_config
from worker.program import Program
from worker.torch_executor import TorchExecutor

NUM_TOKENS = 8
SIZES = (1, 2, 3, 5, 9, 17, 30, 41, 12)


@dataclass(frozen=True)
class Adapted:
    """A model, eight adapters of it, and what model and adapters, merged and alone, answer to one prompt each."""

    program: Program
    folders: list[Path]
    prompts: list[list[int]]
    answers: list[list[int]]

    def executor(self, capacity: int = 2048) -> TorchExecutor:
        """With all adapters loaded, in slots that are not in their order."""
        decoder = self.program.decoder
        slots = LoraSlots(decoder.config, len(self.folders), 16, decoder.dtype, decoder.device)
        for place, folder in enumerate(self.folders):
            matrices = slots.read(folder)
            slots.put((place + 3) % len(self.folders), self.adapter(place, matrices.revision), matrices)
        return executor_of(self.program, capacity, self.program.info.min_prefill_tokens, adapters=slots)

    def adapter(self, place: int, revision: int) -> Adapter:
        return Adapter(f"adapter {place}", revision)

    def requests(self) -> list[Request]:
        """The first without an adapter; the second with the first adapter, and so on."""
        slots = self.executor(64).adapters
        assert slots is not None
        adapters = [self.adapter(place, slots.read(folder).revision) for place, folder in enumerate(self.folders)]
        return [
            request(prompt, NUM_TOKENS, adapter=adapter)
            for prompt, adapter in zip(self.prompts, [None, *adapters], strict=True)
        ]

    @property
    def expected(self) -> list[list[list[int]]]:
        return [[answer] for answer in self.answers]


@pytest.fixture(scope="module", params=["llama", "llama_biased_tied", "qwen2", "qwen3"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    save_tiny_model(request.param, folder / "model")
    return adapted_model(folder, folder / "model", strength=0.2)


def adapted_model(folder: Path, model: Path, strength: float) -> Adapted:
    adapters = [
        save_tiny_adapter(folder / f"adapter-{seed}", read_config(model), seed, strength=strength, changes=changes)
        for seed, changes in enumerate(VARIANTS)
    ]
    merged = [save_merged(folder / f"merged-{place}", model, adapter) for place, adapter in enumerate(adapters)]
    program = load(os.fspath(model))
    random = np.random.default_rng(3)
    prompts = [random.integers(0, program.info.vocab_size, size=size).tolist() for size in SIZES]
    answers = []
    for each, prompt in zip([model, *merged], prompts, strict=True):
        (answer,) = Rig(executor_of(load(os.fspath(each)), 128)).answer([requested(prompt)])
        answers += answer
    return Adapted(program, adapters, prompts, answers)


def requested(prompt: list[int]) -> Request:
    return request(prompt, NUM_TOKENS)


def test_the_adapters_say_something_else_than_the_model(adapted: Adapted) -> None:
    """Else the other tests could not fail."""
    plain = [requested(prompt) for prompt in adapted.prompts]
    differs = [
        said != merged
        for said, merged in zip(Rig(adapted.executor()).answer(plain)[1:], adapted.expected[1:], strict=True)
    ]
    assert sum(differs) >= 7, differs


def test_each_alone(adapted: Adapted) -> None:
    assert Rig(adapted.executor()).answer_alone(adapted.requests()) == adapted.expected


def test_eight_adapters_and_none_in_one_batch(adapted: Adapted) -> None:
    assert Rig(adapted.executor()).answer(adapted.requests()) == adapted.expected


def test_prefill_chunks_and_decodes_in_the_same_forwards(adapted: Adapted) -> None:
    rig = Rig(adapted.executor(), prefill_chunk_tokens=4, max_batched_tokens=33)
    assert rig.answer(adapted.requests()) == adapted.expected


def test_several_rows_of_each_adapter_interleaved(adapted: Adapted) -> None:
    twice = [*adapted.requests(), *reversed(adapted.requests())]
    expected = [*adapted.expected, *reversed(adapted.expected)]
    assert Rig(adapted.executor()).answer(twice) == expected


def test_forks_share_their_adapters_prompt(adapted: Adapted) -> None:
    forked = [replace(each, n=2) for each in adapted.requests()]
    assert Rig(adapted.executor()).answer(forked) == [[answer, answer] for answer in adapted.answers]


def test_a_pool_too_small_for_all_at_once(adapted: Adapted) -> None:
    assert Rig(adapted.executor(capacity=60)).answer(adapted.requests()) == adapted.expected


def test_one_prompt_for_all_is_computed_for_each(adapted: Adapted) -> None:
    """A prefix that was found across adapters would give another answer."""
    rig = Rig(adapted.executor())
    shared = np.array(adapted.prompts[6], np.int64)
    everyone = [replace(each, prompt=shared) for each in adapted.requests()]
    together = rig.answer(everyone)
    assert together == rig.answer(everyone)  # from warm prefixes of their own
    assert together == Rig(adapted.executor()).answer_alone(everyone)
    assert len({tuple(answer[0]) for answer in together}) >= 8


def test_adapters_beside_int8_weights(tmp_path: Path) -> None:
    """A batch says what each says alone; and about what they say beside the weights that are not quantized."""
    save_tiny_model("llama", tmp_path / "model", sizes={"hidden_size": 64, "intermediate_size": 128})
    plain = adapted_model(tmp_path, tmp_path / "model", strength=0.2)
    program = load(os.fspath(tmp_path / "model"), quantization="int8")
    assert program.decoder.weights.is_quantized
    quantized = replace(plain, program=program)
    requests = [replace(each, prompt=np.resize(each.prompt, 9)) for each in quantized.requests()]
    together = Rig(quantized.executor()).answer(requests)
    assert together == Rig(quantized.executor()).answer_alone(requests)
    unquantized = Rig(plain.executor()).answer(requests)
    assert sum(said[0][0] == other[0][0] for said, other in zip(together, unquantized, strict=True)) >= 8
