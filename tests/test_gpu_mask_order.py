"""When a structured answer's masks are made, and who waits for what: a step's forward is launched before the token of
the step before is waited for, its masks are made behind that, and a step without them waits for nobody. Runs on a GPU,
or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.errors import GrammarFailed  # noqa: E402
from planner.request import Request, SamplingParams  # noqa: E402
from tests.cuda_rig import Model, Rig, cuda_executor, tiny_model  # noqa: E402
from tests.ladder_masks import LadderMasks  # noqa: E402
from worker.cuda.decode import CudaDecode  # noqa: E402
from worker.cuda.decode_state import PendingTokens  # noqa: E402
from worker.masks import BitMask, ConstrainedRow  # noqa: E402

NUM_TOKENS = 5
Event = tuple[str, int]
"""("forward", n): the n-th lone decode was launched. ("wait", n): its tokens were waited for. ("mask", n): masks of n
rows were asked for. ("again", n): n rows were drawn again. ("forced", n): of n rows it was asked what must follow."""


class NotedMasks(LadderMasks):
    def __init__(self, vocab_size: int, events: list[Event]) -> None:
        super().__init__(vocab_size)
        self._events = events

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        self._events.append(("mask", len(rows)))
        return super().masks(rows)

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        self._events.append(("forced", len(rows)))
        return super().forced(rows)


class NotedMoment:
    def __init__(self, moment: Any, events: list[Event], number: int) -> None:
        self._moment, self._events, self._number = moment, events, number

    def wait(self) -> None:
        self._events.append(("wait", self._number))
        self._moment.wait()


class NotedState:
    """A decode's state, whose tokens note when they are waited for."""

    def __init__(self, state: Any, events: list[Event]) -> None:
        self._state, self._events, self._num_fetches = state, events, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def fetch_tokens(self, num_rows: int) -> PendingTokens:
        pending = self._state.fetch_tokens(num_rows)
        number, self._num_fetches = self._num_fetches, self._num_fetches + 1
        moment: Any = NotedMoment(pending.ready, self._events, number)
        return PendingTokens(pending.tokens, pending.bad, moment)


class NotedDecode:
    def __init__(self, decode: CudaDecode, events: list[Event]) -> None:
        self._decode, self._events, self._num_steps = decode, events, 0
        self.state = NotedState(decode.state, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decode, name)

    def step(self, *args: Any) -> None:
        self._events.append(("forward", self._num_steps))
        self._num_steps += 1
        self._decode.step(*args)

    def draw(self, logits: torch.Tensor, *rest: torch.Tensor) -> None:
        self._events.append(("again", len(logits)))
        self._decode.draw(logits, *rest)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def events_of(model: Model, moduli: Iterable[int | None]) -> list[Event]:
    """Of lone decodes of requests that are prompted together, with two steps in flight."""
    events: list[Event] = []
    masks = NotedMasks(model.decoder.config.vocab_size, events)
    executor = cuda_executor(model, grammars=masks, around_decode=lambda decode: NotedDecode(decode, events))
    draw = np.random.default_rng(1)
    requests = [
        Request(draw.integers(0, 200, size=4), NUM_TOKENS, SamplingParams(grammar=modulus and str(modulus), seed=7))
        for modulus in moduli
    ]
    Rig(executor, depth=2).answer(requests)
    return events[events.index(("forward", 0)) :]


def assert_run_ahead(events: list[Event]) -> None:
    """Tokens were waited for only after the next step's forward was on its way, but for the last one's."""
    last = max(number for kind, number in events if kind == "forward")
    for place, (kind, number) in enumerate(events):
        if kind == "wait" and number < last:
            assert ("forward", number + 1) in events[:place], events


def test_masks_are_made_while_the_forward_runs_that_they_are_for(model: Model) -> None:
    events = events_of(model, [7, 5])
    assert_run_ahead(events)
    launched = [kind for kind, _ in events if kind in ("forward", "mask", "again")]
    assert launched == ["forward", "mask", "again"] * (NUM_TOKENS - 1), events


def test_what_must_follow_is_asked_behind_the_draws_that_the_device_waits_for(model: Model) -> None:
    events = events_of(model, [7, 5])
    asked = [(kind, number) for kind, number in events if kind in ("mask", "again", "forced")]
    assert asked == [("mask", 2), ("again", 2), ("forced", 2)] * (NUM_TOKENS - 1), events


def test_rows_without_a_grammar_are_neither_masked_nor_drawn_again(model: Model) -> None:
    events = events_of(model, [7, None, None])
    assert_run_ahead(events)
    assert {number for kind, number in events if kind in ("mask", "again", "forced")} == {1}, events


def test_a_step_without_a_grammar_asks_for_no_masks_and_waits_for_nobody(model: Model) -> None:
    events = events_of(model, [None, None])
    assert_run_ahead(events)
    assert {kind for kind, _ in events} == {"forward", "wait"}, events
    waits = [number for kind, number in events if kind == "wait"]
    assert waits == sorted(set(waits)), "tokens of a step were waited for twice: to launch another, and to settle it"
