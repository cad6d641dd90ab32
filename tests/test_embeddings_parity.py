"""Vectors of prompts in float32 are what transformers has as hidden states, whatever is batched or cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from planner.request import Pooling, Request
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request

LENGTHS = (1, 2, 5, 9, 30, 75)


def vectors(rig: Rig, requests: list[Request]) -> list[tuple[float, ...]]:
    ids = [rig.planner.submit(one) for one in requests]
    ended = {update.request_id: update for update in rig.run() if update.finish_reason is not None}
    return [ended[request_id].vector for request_id in ids]


@pytest.mark.parametrize("name", ["llama_biased_tied", "qwen3", "mistral_window"])
def test_vectors_are_the_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny_model(name, tmp_path)
    program = load(str(tmp_path))
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, 97, size=size).tolist() for size in LENGTHS]
    with torch.no_grad():
        states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    for pooling in Pooling:
        requests = [request(prompt, 0, pooling=pooling) for prompt in prompts]
        expected = [(state[-1] if pooling is Pooling.LAST else state.mean(dim=0)).tolist() for state in states]
        for chunk in (512, 4, 1):
            found = vectors(Rig(executor_of(program, 512), prefill_chunk_tokens=chunk), requests)
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_vectors_beside_answers_disturb_neither(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    program = load(str(tmp_path))
    prompt = list(range(20))
    (answer,), (vector,) = (
        Rig(executor_of(program, 512)).answer([request(prompt, 8)]),
        vectors(Rig(executor_of(program, 512)), [request(prompt, 0, pooling=Pooling.MEAN)]),
    )
    rig = Rig(executor_of(program, 512), prefill_chunk_tokens=7)
    ids = [rig.planner.submit(request(prompt, 8)), rig.planner.submit(request(prompt, 0, pooling=Pooling.MEAN))]
    updates = rig.run()
    assert [token for update in updates if update.request_id == ids[0] for token in update.tokens] == answer[0]
    (together,) = (update.vector for update in updates if update.request_id == ids[1] and update.vector)
    np.testing.assert_allclose(together, vector, rtol=1e-4, atol=1e-5)
