"""The inbox is bounded, and what it must not turn away takes no more room when it is repeated."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from planner.errors import InvalidRequest, QueueFull, Unavailable
from planner.limits import Snapshot
from tests.fakes import fake_request
from worker.inbox import Inbox

REQUEST = fake_request()


def opened(size: int = 10) -> Inbox[str]:
    """Client "a" is connected, with key 1 live."""
    inbox: Inbox[str] = Inbox(size)
    inbox.connect("a")
    inbox.submit("a", 1, REQUEST)
    inbox.take(wait=False)
    return inbox


def test_submits_are_bounded_and_a_refused_one_changes_nothing() -> None:
    inbox = opened(size=2)
    inbox.submit("a", 2, REQUEST)
    inbox.submit("a", 3, REQUEST)
    with pytest.raises(QueueFull):
        inbox.submit("a", 4, REQUEST)
    assert inbox.num_live == 3
    assert [submit.key for submit in inbox.take(wait=False).submits] == [2, 3]
    inbox.submit("a", 4, REQUEST)


def test_a_snapshot_counts_every_request_once_from_the_moment_it_is_submitted() -> None:
    inbox: Inbox[str] = Inbox(10)
    inbox.connect("a")
    assert inbox.snapshot is None
    idle = Snapshot(100, 100, 0, 0, num_running=0, num_waiting=0, queued_prefill_tokens=0, step=0)
    inbox.advise(1.0, idle)
    assert inbox.snapshot == idle
    asked = fake_request(range(7), max_tokens=5, n=2)
    one = replace(idle, num_waiting=1, queued_prefill_tokens=7, answer_tokens=10)
    inbox.submit("a", 1, asked)
    assert inbox.snapshot == one
    inbox.take(wait=False)
    assert inbox.snapshot == one, "the planner has it, and has not said so"
    inbox.submit("a", 2, asked)
    assert inbox.snapshot == replace(idle, num_waiting=2, queued_prefill_tokens=14, answer_tokens=20)
    planned = replace(idle, num_running=2, queued_prefill_tokens=7, answer_tokens=10)
    inbox.advise(1.0, planned)
    assert inbox.snapshot == replace(planned, num_waiting=1, queued_prefill_tokens=14, answer_tokens=20)


def test_a_cancel_of_a_key_that_is_not_live_takes_no_room() -> None:
    inbox = opened()
    for key in range(2, 1000):
        inbox.cancel("a", key, None)
    inbox.cancel("nobody", 1, None)
    assert not inbox.take(wait=False)


def test_cancels_of_one_key_are_one() -> None:
    inbox = opened()
    inbox.cancel("a", 1, [0])
    inbox.cancel("a", 1, [2, 0])
    assert inbox.take(wait=False).cancels == {("a", 1): frozenset({0, 2})}
    inbox.cancel("a", 1, None)
    inbox.cancel("a", 1, [2])
    assert inbox.take(wait=False).cancels == {("a", 1): None}


def test_a_cancel_for_a_key_that_has_just_ended_does_not_hit_its_next_use() -> None:
    inbox = opened()
    inbox.cancel("a", 1, None)
    inbox.forget([("a", 1)])
    inbox.submit("a", 1, REQUEST)
    mail = inbox.take(wait=False)
    assert [submit.key for submit in mail.submits] == [1]
    assert not mail.cancels


def test_a_live_key_and_a_closed_client_are_refused() -> None:
    inbox = opened()
    with pytest.raises(InvalidRequest):
        inbox.submit("a", 1, REQUEST)
    inbox.close("a")
    inbox.close("a")
    assert inbox.take(wait=False).closes == ["a"]
    with pytest.raises(Unavailable):
        inbox.submit("a", 2, REQUEST)
    assert inbox.num_live == 0


def test_the_first_reason_for_the_end_stays() -> None:
    inbox = opened()
    inbox.refuse("draining")
    with pytest.raises(Unavailable, match="draining"):
        inbox.submit("a", 2, REQUEST)
    inbox.stop("died")
    inbox.stop("stopped")
    inbox.refuse("draining")
    with pytest.raises(Unavailable, match="died"):
        inbox.connect("b")
    assert inbox.take(wait=False).stopping


@pytest.mark.parametrize(
    "tell",
    [
        lambda inbox: inbox.connect("b"),
        lambda inbox: inbox.submit("a", 2, REQUEST),
        lambda inbox: inbox.cancel("a", 1, None),
        lambda inbox: inbox.close("a"),
        lambda inbox: inbox.refuse("draining"),
        lambda inbox: inbox.stop("stopped"),
    ],
    ids=["connect", "submit", "cancel", "close", "refuse", "stop"],
)
def test_an_engine_that_waits_is_woken_by_everything(tell: object) -> None:
    inbox = opened()
    mail = []
    waiting = threading.Thread(target=lambda: mail.append(inbox.take(wait=True)))
    waiting.start()
    assert callable(tell)
    tell(inbox)
    waiting.join(10)
    assert not waiting.is_alive()
    assert mail[0]


def test_a_recall_is_for_live_keys_alone_and_comes_once_behind_the_submits() -> None:
    inbox = opened()
    inbox.submit("a", 2, REQUEST)
    for key in (2, 1, 2, 7):
        inbox.recall("a", key)
    mail = inbox.take(wait=False)
    assert [submit.key for submit in mail.submits] == [2]
    assert list(mail.recalls) == [("a", 2), ("a", 1)]
    assert mail.has_news
    inbox.recall("a", 1)
    inbox.forget([("a", 1)])
    assert not inbox.take(wait=False).recalls
