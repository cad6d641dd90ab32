"""Where the time of an executor's steps goes, on the host and on the device, for benchmarks that take steps themselves.

Host: the clock between calls. Device: events of CUDA on the stream that the executor launches on, read at the end, so
that nothing waits. A few microseconds a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from planner.errors import GrammarFailed
from planner.step import Step
from worker.executor import Executor
from worker.masks import BitMask, ConstrainedRow, MaskMaker

PERCENTILES = (50, 90, 99)


class StepTimes:
    """Milliseconds by part of a step. `launch` of a step without masks; of one with masks `wait` (the forward's launch,
    and until the token before is here), `masks` and `draws` (their launch, and within it `forced`: asking what must
    follow); `plan`, `collect`, `commit` and whatever else is timed by name.

    On a GPU, too: `device_forward`, to its end or until the masks were here, whichever is later; `device_draws`, what
    is behind that; `device_idle`, from one step's end to the next one's first kernel.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._parts: dict[str, list[float]] = defaultdict(list)
        self._masked: list[tuple[float, float, Any]] = []  # of the step that is being launched
        self._events: list[tuple[Any, Any, Any]] = []  # of each step: its begin, its masks if it had any, its end

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._parts[part].append(1000 * (time.perf_counter() - began))

    def launch(self, executor: Executor, step: Step) -> None:
        """Have the step launched."""
        self._masked.clear()
        began, first = time.perf_counter(), self._event()
        executor.launch(step)
        last, ended = self._event(), time.perf_counter()
        if not self._masked:
            self._note("launch", began, ended)
            self._events.append((first, None, last))
            return
        asked, answered, event = self._masked[0]
        self._note("wait", began, asked)
        self._note("masks", asked, answered)
        self._note("draws", answered, ended)
        self._events.append((first, event, last))

    def had_masks(self, asked: float, answered: float) -> None:
        """The step that is being launched asked for masks, and got them, at these moments of `time.perf_counter`."""
        self._masked.append((asked, answered, self._event()))

    def take(self) -> dict[str, list[float]]:
        """Percentiles (50, 90, 99) of each part, in milliseconds, since the last call; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
            self._read_events()
        told = {
            part: [round(float(np.percentile(times, each)), 3) for each in PERCENTILES]
            for part, times in self._parts.items()
        }
        self._parts.clear()
        self._events.clear()
        return told

    def _note(self, part: str, began: float, ended: float) -> None:
        self._parts[part].append(1000 * (ended - began))

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read_events(self) -> None:
        before: Any = None
        for first, masked, last in self._events:
            if before is not None:
                self._parts["device_idle"].append(before.elapsed_time(first))
            self._parts["device_forward"].append(first.elapsed_time(last if masked is None else masked))
            if masked is not None:
                self._parts["device_draws"].append(masked.elapsed_time(last))
            before = last


class TimedMasks:
    """A `MaskMaker` around another one, that tells `times` when masks were asked for. While it `forces` nothing, each
    token is drawn by itself."""

    def __init__(self, masks: MaskMaker, times: StepTimes) -> None:
        self._masks, self._times = masks, times
        self.forces = True

    def prepare(self, grammar: str) -> None:
        self._masks.prepare(grammar)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        self._masks.drop(sequence_ids)

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        asked = time.perf_counter()
        found = self._masks.masks(rows)
        self._times.had_masks(asked, time.perf_counter())
        return found

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        if not self.forces:
            return [() for _ in rows]
        with self._times.timing("forced"):
            return self._masks.forced(rows)

    def close(self) -> None:
        self._masks.close()
