"""An engine made from its settings, for whoever runs one in its own process: a worker, or an offline batch. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opentelemetry.trace import Tracer

from cluster.config import load_executor_factory
from cluster.language.text import load_text
from cluster.model_settings import BUILD_EXECUTOR
from planner.limits import Limits
from worker.config import EngineConfig
from worker.engine import Engine
from worker.executor import Executor, ProgramInfo, limits_for


def make_engine(
    settings: EngineConfig,
    on_death: Callable[[BaseException], None],
    executor: str = BUILD_EXECUTOR,
    step_log: Path | None = None,
    tracer: Tracer | None = None,
) -> Engine:
    """An engine that is not started yet. `settings.model` is a path; `executor` is the import path of what makes the
    executor. Executor and limits are made on the engine's thread when it starts. `step_log`, `tracer`: see `Engine`."""
    factory = load_executor_factory(executor)
    made: list[Executor] = []

    def make() -> Executor:
        made.append(factory(settings, lambda: load_text(Path(settings.model)).vocabulary()))
        return made[0]

    def limits(info: ProgramInfo) -> Limits:
        return limits_for(settings, info, made[0].max_steps_in_flight)

    return Engine(make, limits, inbox_size=settings.max_waiting, on_death=on_death, step_log=step_log, tracer=tracer)
