"""An executor for served tests: the fake with the vocabulary of the tiny tokenizer, and a step that takes time."""

from __future__ import annotations

from tests.fakes import FakeExecutor, fake_info
from tests.tiny_text import tiny_text
from worker.config import CPU_PREFILL_TOKENS, EngineConfig
from worker.vocabulary import VocabularySource

STEP_TIME_S = 0.02


def make_executor(config: EngineConfig, _: VocabularySource | None = None) -> FakeExecutor:
    """Named by its import path in the settings of a service; made in each worker's process."""
    return FakeExecutor(
        fake_info(
            vocab_size=tiny_text().vocab_size,
            context=config.max_model_len or 4096,
            num_cells=config.max_cells or 65_536,
            max_prefill_tokens=config.max_prefill_tokens or CPU_PREFILL_TOKENS,
            min_prefill_tokens=config.min_prefill_tokens,
            widths=config.decode_widths,
        ),
        step_time_s=STEP_TIME_S,
        keeps_record=False,
    )
