"""Every architecture answers as transformers does: alone, batched, and in chunks of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.errors import InvalidConfiguration
from tests.tiny_models import TINY_MODELS, greedy_answer, save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request

NUM_TOKENS = 12


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny_model(name, tmp_path)
    program = load(str(tmp_path))
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 97, size=size).tolist() for size in (1, 2, 5, 9, 30, 75)]
    expected = [[greedy_answer(model, prompt, NUM_TOKENS)] for prompt in prompts]
    requests = [request(prompt, NUM_TOKENS) for prompt in prompts]
    assert Rig(executor_of(program, 512)).answer_alone(requests) == expected
    assert Rig(executor_of(program, 512)).answer(requests) == expected
    assert Rig(executor_of(program, 512), prefill_chunk_tokens=4).answer(requests) == expected


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    prompt = [5, 6, 7]
    rig = Rig(executor_of(load(str(tmp_path / "sharded")), 64))
    assert rig.answer([request(prompt, 8)]) == [[greedy_answer(model, prompt, 8)]]


def test_an_operator_may_shorten_the_models_context_and_not_lengthen_it(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    assert load(str(tmp_path)).info.context == 256
    assert load(str(tmp_path), max_model_len=100).info.context == 100
    with pytest.raises(InvalidConfiguration, match="max_model_len is 257, but the model was made for 256 tokens"):
        load(str(tmp_path), max_model_len=257)


def test_dummy_weights_need_no_tensors_and_follow_the_seed(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def answer(seed: int) -> list[list[list[int]]]:
        program = load(str(tmp_path), load_format="dummy", seed=seed)
        return Rig(executor_of(program, 64)).answer([request([1, 2, 3], 16)])

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert answer(2**64 - 1)[0][0]
