"""A running engine for tests: the real planner, a scripted executor, and a listener that keeps all it hears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes import FakeExecutor, fake_info, fake_limits
from tests.recorder import Recorder
from worker.client import Client
from worker.engine import Engine

FOREVER = 900


@dataclass
class Bench:
    """A running engine with one client, and what its death would leave."""

    engine: Engine
    executor: FakeExecutor
    heard: Recorder
    client: Client
    deaths: list[BaseException]


@contextmanager
def running(executor: FakeExecutor | None = None, *, inbox_size: int = 1000, **limits: Any) -> Iterator[Bench]:
    executor = executor or FakeExecutor()
    wanted = fake_limits(executor.info, max_steps_in_flight=executor.max_steps_in_flight, **limits)
    deaths: list[BaseException] = []
    engine = Engine(executor, wanted, inbox_size=inbox_size, on_death=deaths.append, check_cells=True)
    engine.start()
    heard = Recorder()
    try:
        yield Bench(engine, executor, heard, engine.connect(heard), deaths)
    finally:
        executor.release()
        engine.stop()
        assert executor.closed


def holding(depth: int = 1, **info: Any) -> FakeExecutor:
    executor = FakeExecutor(fake_info(**info), max_steps_in_flight=depth)
    executor.hold()
    return executor
