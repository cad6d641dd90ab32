"""A running engine of a real model loads an adapter while it answers; with it, it says what the merged model says."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.engine_factory import make_engine
from tests.recorder import Recorder
from tests.tiny_adapters import ALL_MODULES, save_merged, save_tiny_adapter
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.config import EngineConfig
from worker.models.config import read_config

WITHIN_S = 60


def test_an_adapter_that_is_loaded_while_others_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_model("qwen3", model)
    changes = {"target_modules": list(ALL_MODULES)}
    adapter = save_tiny_adapter(tmp_path / "adapter", read_config(model), 3, strength=0.2, changes=changes)
    merged = save_merged(tmp_path / "merged", model, adapter)
    prompt = [5, 6, 7, 8, 9, 10]
    plain = Rig(executor_of(load(os.fspath(model)), 512)).answer([request(prompt, 60)])[0][0]
    adapted = Rig(executor_of(load(os.fspath(merged)), 512)).answer([request(prompt, 12)])[0][0]
    assert plain[:12] != adapted

    told = EngineConfig(model=os.fspath(model), device="cpu", max_cells=1024, num_threads=1, enable_lora=True)
    deaths: list[BaseException] = []
    engine = make_engine(told, deaths.append)
    engine.start()
    try:
        heard = Recorder()
        client = engine.connect(heard)
        client.submit(1, request(prompt, 60))
        heard.wait(lambda: bool(heard.tokens.get((1, 0))), WITHIN_S)
        loaded = engine.load_adapter("poet", adapter).result(WITHIN_S)
        client.submit(2, request(prompt, 12, adapter=loaded))
        client.submit(3, request(prompt, 12))
        heard.wait_ended(1, 2, 3, timeout_s=WITHIN_S)
        assert list(heard.tokens[1, 0]) == plain
        assert list(heard.tokens[2, 0]) == adapted
        assert list(heard.tokens[3, 0]) == plain[:12]
        assert engine.unload_adapter("poet").result(WITHIN_S) == loaded
        assert engine.adapters == ()
    finally:
        engine.stop()
    assert deaths == []
