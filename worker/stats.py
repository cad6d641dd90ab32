"""How long an engine's steps took, by what they ran. Values; the engine publishes a new one after each step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from planner.step import Step


class StepKind(Enum):
    """What a step ran. A chunk of one token that samples counts as a decode, wherever its token came from."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


def kind_of(step: Step) -> StepKind:
    decodes = sum(chunk.length == 1 and chunk.samples for chunk in step.chunks)
    if decodes == len(step.chunks):
        return StepKind.DECODE
    return StepKind.MIXED if decodes else StepKind.PREFILL


def num_prefilled(step: Step) -> int:
    """Tokens of its chunks that are no decodes."""
    return sum(chunk.length for chunk in step.chunks if chunk.length > 1 or not chunk.samples)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the steps of one kind, in seconds."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def plus(self, duration_s: float) -> StepTimes:
        return StepTimes(self.count + 1, self.total_s + duration_s, max(self.longest_s, duration_s))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The three kinds are exclusive and add up to all steps. A step's duration runs from its launch, or from the end
    of the step before it where that is later, to the moment when its result was there.

    `emitted_at`: when the last reports were handed to the listeners, on `time.monotonic`'s clock (one for all
    processes of a machine); None before the first.
    """

    decode: StepTimes = field(default_factory=StepTimes)
    prefill: StepTimes = field(default_factory=StepTimes)
    mixed: StepTimes = field(default_factory=StepTimes)
    emitted_at: float | None = None

    @property
    def num_steps(self) -> int:
        return self.decode.count + self.prefill.count + self.mixed.count

    def after_step(self, kind: StepKind, duration_s: float) -> EngineStats:
        match kind:
            case StepKind.DECODE:
                return replace(self, decode=self.decode.plus(duration_s))
            case StepKind.PREFILL:
                return replace(self, prefill=self.prefill.plus(duration_s))
            case StepKind.MIXED:
                return replace(self, mixed=self.mixed.plus(duration_s))
