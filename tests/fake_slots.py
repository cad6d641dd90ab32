"""Slots of the fake executor: they remember who is in them, and read nothing but a name and a number."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InvalidAdapter
from planner.request import Adapter
from worker.adapters import AdapterMatrices
from worker.models.lora_config import WEIGHTS_FILE

REVISION_FILE = "revision"


@dataclass(frozen=True, slots=True)
class FakeMatrices:
    revision: int


class FakeSlots:
    """An `AdapterSlots`. An adapter's folder has one file with its revision, as a number."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.held: dict[int, Adapter] = {}

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def read(self, folder: Path) -> FakeMatrices:
        try:
            return FakeMatrices(int((folder / REVISION_FILE).read_text()))
        except (OSError, ValueError) as error:
            raise InvalidAdapter(f"{folder} is no adapter: {error}", param="lora_path") from error

    def put(self, slot: int, adapter: Adapter, matrices: AdapterMatrices) -> None:
        assert 0 <= slot < self._num_slots, f"there is no slot {slot}"
        assert slot not in self.held, f"slot {slot} is taken by {self.held[slot]}"
        assert matrices.revision == adapter.revision
        self.held[slot] = adapter

    def drop(self, adapter: Adapter) -> None:
        (slot,) = [slot for slot, held in self.held.items() if held == adapter]
        del self.held[slot]


def save_fake_adapter(folder: Path, revision: int) -> Path:
    """What `raycomb serve` checks before it starts is there too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    (folder / WEIGHTS_FILE).touch()
    (folder / REVISION_FILE).write_text(str(revision))
    return folder
