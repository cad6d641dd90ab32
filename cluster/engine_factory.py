"""An engine made from its settings, for whoever runs one in its own process: a worker, or an offline batch. No Ray."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config import BUILD_EXECUTOR, load_executor_factory
from planner.limits import Limits
from worker.config import EngineConfig
from worker.engine import Engine
from worker.executor import Executor, ProgramInfo


def make_engine(
    settings: EngineConfig, on_death: Callable[[BaseException], None], executor: str = BUILD_EXECUTOR
) -> Engine:
    """An engine that is not started yet. `settings.model` is a path; `executor` is the import path of what makes the
    executor. Executor and limits are made on the engine's thread when it starts."""
    factory = load_executor_factory(executor)
    made: list[Executor] = []

    def make() -> Executor:
        made.append(factory(settings))
        return made[0]

    def limits(info: ProgramInfo) -> Limits:
        return engine_limits(settings, info, made[0].max_steps_in_flight)

    return Engine(make, limits, inbox_size=settings.max_waiting, on_death=on_death)


def engine_limits(settings: EngineConfig, info: ProgramInfo, max_steps_in_flight: int) -> Limits:
    """What the planner keeps to: sizes from the program, the rest from the operator."""
    return Limits(
        capacity=info.num_cells,
        context=info.context,
        vocab_size=info.vocab_size,
        max_prefill_tokens=info.max_prefill_tokens,
        min_prefill_tokens=info.min_prefill_tokens,
        widths=info.widths,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.batched_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_waiting=settings.max_waiting,
        max_steps_in_flight=max_steps_in_flight,
        prefix_caching=settings.prefix_caching,
    )
