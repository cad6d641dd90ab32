"""Engines on a GPU with room for adapters: sized, loading while they answer, and refused where there is no memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from benchmarks.random_model import write_model  # noqa: E402
from cluster.engine_factory import make_engine  # noqa: E402
from planner.errors import InvalidConfiguration  # noqa: E402
from planner.request import Adapter, Request, SamplingParams  # noqa: E402
from tests.cuda_rig import CONTEXT, DEVICE, Model, Rig, torch_executor  # noqa: E402
from tests.lora_rig import merged_weights, random_matrices  # noqa: E402
from tests.recorder import Recorder  # noqa: E402
from tests.test_gpu_packed import with_weights  # noqa: E402
from tests.tiny_adapters import ALL_MODULES, save_tiny_adapter  # noqa: E402
from worker.config import EngineConfig  # noqa: E402
from worker.cuda.lora import CudaLoraSlots  # noqa: E402
from worker.models.lora import LoraMatrices, read_lora  # noqa: E402
from worker.models.rope_tables import rope_tables  # noqa: E402
from worker.program import build_executor, load_program  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 12
WITHIN_S = 60


def merged(model: Model, matrices: LoraMatrices) -> Model:
    return with_weights(model, merged_weights(model.decoder.config, model.decoder.weights, matrices))


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    """Of a service with random weights and room for two adapters."""
    settings: dict[str, Any] = {
        "model": str(write_model("small", folder)), "device": "cuda", "dtype": "float32", "load_format": "dummy",
        "max_model_len": CONTEXT, "max_num_seqs": 4, "max_prefill_tokens": 64, "swap_space": 0, "enable_lora": True,
        "max_loras": 2, "max_lora_rank": 4,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


def model_of(config: EngineConfig) -> Model:
    """Its weights once more."""
    decoder = load_program(config).decoder
    cos, sin = rope_tables(decoder.config.rope, decoder.config.head_dim, CONTEXT)
    return Model(decoder, (cos.to(DEVICE), sin.to(DEVICE)), torch.float32)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_an_engine_that_was_sized_with_room_for_adapters(tmp_path: Path, cuda_graph: bool) -> None:
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (1, 1)
    utilization = 1 - 0.9 * free / total  # other tests may have a part of the device
    config = engine_config(tmp_path, gpu_memory_utilization=utilization, cuda_graph=cuda_graph)
    model = model_of(config)
    matrices = random_matrices(model.decoder.config, 3, (4, 1), layers=2)
    adapter = Adapter("late", 1)
    prompt = np.random.default_rng(2).integers(0, model.decoder.config.vocab_size, size=50)
    asked = [Request(prompt, NUM_TOKENS, GREEDY), Request(prompt, NUM_TOKENS, GREEDY, adapter=adapter)]
    expected = Rig(torch_executor(model)).answer(asked[:1])
    expected += Rig(torch_executor(merged(model, matrices))).answer(asked[:1])
    assert expected[0] != expected[1]
    executor = build_executor(config)
    slots = executor.adapters
    assert isinstance(slots, CudaLoraSlots)
    assert slots.num_slots == 2
    rig = Rig(executor, depth=2, max_num_seqs=4)
    assert rig.answer(asked[:1]) == expected[:1]
    slots.put(0, adapter, slots.packed(matrices))  # the slot that the start has tried
    assert rig.answer(asked) == expected
    executor.close()


def test_an_engine_loads_adapters_while_it_answers(tmp_path: Path) -> None:
    config = engine_config(tmp_path, max_cells=4096)
    model = model_of(config)
    changes = {"target_modules": list(ALL_MODULES)}
    folders = [
        save_tiny_adapter(tmp_path / str(seed), model.decoder.config, seed, strength=0.1, changes=changes)
        for seed in range(3)
    ]
    prompt = np.random.default_rng(4).integers(0, model.decoder.config.vocab_size, size=30)
    plain, short = Request(prompt, 100, GREEDY), Request(prompt, NUM_TOKENS, GREEDY)
    said = [Rig(torch_executor(model)).answer([plain])[0][0]]
    for folder in folders:
        matrices = read_lora(folder, model.decoder.config, 4)
        said += Rig(torch_executor(merged(model, matrices))).answer([short])[0]
    assert len({tuple(tokens[:NUM_TOKENS]) for tokens in said}) == 4

    deaths: list[BaseException] = []
    engine = make_engine(config, deaths.append)
    engine.start()
    heard = Recorder()
    client = engine.connect(heard)
    try:
        client.submit(1, plain)
        heard.wait(lambda: bool(heard.tokens.get((1, 0))), WITHIN_S)
        for place in (0, 1):
            loaded = engine.load_adapter(f"adapter {place}", folders[place]).result(WITHIN_S)
            client.submit(2 + place, replace(short, adapter=loaded))
        heard.wait_ended(1, 2, 3, timeout_s=WITHIN_S)
        engine.unload_adapter("adapter 0").result(WITHIN_S)
        third = engine.load_adapter("adapter 2", folders[2]).result(WITHIN_S)  # in the only slot that is free
        client.submit(4, replace(short, adapter=third))
        client.submit(5, replace(short, adapter=loaded))
        client.submit(6, short)
        heard.wait_ended(4, 5, 6, timeout_s=WITHIN_S)
    finally:
        engine.stop()
    assert deaths == []
    found = [list(heard.tokens[key, 0]) for key in range(1, 7)]
    assert found == [*said[:3], said[3], said[2], said[0][:NUM_TOKENS]]


def test_more_adapters_than_the_memory_holds_are_refused(tmp_path: Path) -> None:
    config = engine_config(tmp_path, max_loras=2**20, max_lora_rank=256)
    with pytest.raises(InvalidConfiguration, match="does not hold 1048576 adapters of rank 256"):
        build_executor(config)
