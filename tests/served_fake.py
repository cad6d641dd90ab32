"""Executors for served tests: the fake with the vocabulary of the tiny tokenizer, and a step that takes time."""

from __future__ import annotations

import threading
from pathlib import Path

from planner.step import Step
from tests.fakes import FakeExecutor, fake_info
from tests.tiny_text import tiny_text
from worker.config import CPU_PREFILL_TOKENS, EngineConfig
from worker.executor import ProgramInfo
from worker.vocabulary import VocabularySource

STEP_TIME_S = 0.02
SLOW_STEP_TIME_S = 0.1
HANG = "hang"


def make_executor(config: EngineConfig, _: VocabularySource | None = None) -> FakeExecutor:
    """Named by its import path in the settings of a service; made in each worker's process."""
    num_slots = config.max_loras if config.enable_lora else 0
    return FakeExecutor(_info(config), step_time_s=STEP_TIME_S, keeps_record=False, num_slots=num_slots)


class HangingExecutor(FakeExecutor):
    """The first executor that finds the file takes it away and hangs in its step, for ever."""

    def __init__(self, info: ProgramInfo, file: Path) -> None:
        super().__init__(info, step_time_s=SLOW_STEP_TIME_S, keeps_record=False)
        self._file = file

    def launch(self, step: Step) -> None:
        if self._file.exists():
            self._file.unlink()
            threading.Event().wait()
        super().launch(step)


def make_hanging_executor(config: EngineConfig, _: VocabularySource | None = None) -> FakeExecutor:
    """As `make_executor`, slower, and it hangs where the checkpoint's folder has a file named `HANG`."""
    return HangingExecutor(_info(config), Path(config.model) / HANG)


def _info(config: EngineConfig) -> ProgramInfo:
    return fake_info(
        vocab_size=tiny_text().vocab_size,
        context=config.max_model_len or 4096,
        num_cells=config.max_cells or 65_536,
        max_prefill_tokens=config.max_prefill_tokens or CPU_PREFILL_TOKENS,
        min_prefill_tokens=config.min_prefill_tokens,
        widths=config.decode_widths,
    )
