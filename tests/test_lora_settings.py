"""Settings of adapters that contradict each other, or what cannot compute with adapters, are refused before a start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.settings import named_modules
from cluster.config import service_config
from planner.errors import InvalidAdapter, InvalidConfiguration
from tests.tiny_adapters import save_tiny_adapter
from tests.tiny_models import save_tiny_model
from worker.config import EngineConfig
from worker.models.config import read_config
from worker.program import build_executor

LORA = {"engine": {"model": "tiny", "enable_lora": True, "max_loras": 2}}
ADMIN = {"admin_keys": ["k"]}


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        ({"engine": {"model": "m"}, "lora_modules": {"a": "/a"}}, "lora_modules", "enable_lora is not"),
        ({"engine": {"model": "m"}, "lora_folder": "/a", "http": ADMIN}, "lora_folder", "enable_lora is not"),
        (LORA | {"lora_folder": "/a"}, "lora_folder", "admin_keys is empty"),
        (LORA | {"lora_modules": {"a": "/a", "b": "/b", "c": "/c"}}, "lora_modules", "3 adapters, and max_loras is 2"),
        (LORA | {"lora_modules": {"tiny": "/a"}}, "lora_modules", "calls an adapter 'tiny', as the model"),
        (
            LORA | {"lora_modules": {"b": "/a"}, "http": {"served_model_names": ["a", "b"]}},
            "lora_modules",
            "calls an adapter 'b'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        service_config(settings)
    assert refusal.value.param == param
    assert words in refusal.value.message


def test_settings_that_agree_are_taken() -> None:
    config = service_config(LORA | {"lora_modules": {"a": "/a"}, "lora_folder": "/b", "http": ADMIN})
    assert config.lora_modules == {"a": "/a"}


def test_modules_of_the_command_line_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("llama", tmp_path / "model")
    save_tiny_adapter(tmp_path / "good", read_config(tmp_path / "model"), 1)
    save_tiny_adapter(tmp_path / "bad", read_config(tmp_path / "model"), 1, changes={"use_dora": True})
    monkeypatch.chdir(tmp_path)
    assert named_modules(["pirate=good"]) == {"pirate": os.fspath(tmp_path / "good")}
    assert named_modules(['{"name": "pirate", "path": "good"}']) == {"pirate": os.fspath(tmp_path / "good")}
    for given, words in (
        (["pirate"], "takes name=folder, not 'pirate'"),
        (["=good"], "takes name=folder"),
        (["pirate="], "takes name=folder"),
        (['{"name": "pirate"}'], "takes name=folder"),
        (['{"name": "pirate"'], "is not JSON"),
        (['{"name": "pirate", "path": "good", "rank": 3}'], "'rank', which is not known"),
        (["pirate=good", "pirate=good"], "names 'pirate' twice"),
    ):
        with pytest.raises(InvalidConfiguration, match=words):
            named_modules(given)
    with pytest.raises(InvalidAdapter, match="use_dora"):
        named_modules(["pirate=bad"])
    with pytest.raises(InvalidAdapter, match="no adapter of PEFT"):
        named_modules(["pirate=nowhere"])


def test_what_computes_with_no_adapters_says_so_at_once() -> None:
    with pytest.raises(InvalidConfiguration, match="enable_lora is not supported by an exported program yet"):
        build_executor(EngineConfig(model="m.pt2", device="cpu", enable_lora=True))


def test_a_worker_has_the_slots_that_it_was_told(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "model")
    adapter = save_tiny_adapter(tmp_path / "adapter", read_config(tmp_path / "model"), 1)
    told = {"model": os.fspath(tmp_path / "model"), "max_cells": 16, "num_threads": 1}
    plain = build_executor(EngineConfig(**told))
    assert plain.adapters is None
    plain.close()
    executor = build_executor(EngineConfig(**told, enable_lora=True, max_loras=3, max_lora_rank=3))
    slots = executor.adapters
    assert slots is not None
    assert slots.num_slots == 3
    with pytest.raises(InvalidAdapter, match="max_lora_rank is 3"):
        slots.read(adapter)
    executor.close()
