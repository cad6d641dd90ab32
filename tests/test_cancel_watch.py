"""The time from a cancel to the worker's last word is taken once a request, and nothing is kept behind it."""

from __future__ import annotations

from cluster.routing.cancel_watch import CancelWatch
from worker.distribution import Histogram


def watch() -> tuple[CancelWatch, Histogram]:
    free = Histogram((1.0, 5.0))
    return CancelWatch(free), free


def test_the_last_of_several_sequences_ends_the_time() -> None:
    cancels, free = watch()
    cancels.sent(1, 3)
    cancels.ended(1, 0.0)
    cancels.cancelled(1, 10.0)
    cancels.cancelled(1, 11.0)
    cancels.ended(1, 12.0)
    assert free.distribution.count == 0
    cancels.ended(1, 14.0)
    assert free.distribution.counts == (0, 1, 0)
    assert free.distribution.total == 4.0
    assert len(cancels) == 0


def test_a_request_that_ends_by_itself_is_not_counted() -> None:
    cancels, free = watch()
    cancels.sent(1, 1)
    cancels.ended(1, 1.0)
    cancels.cancelled(1, 2.0)
    assert free.distribution.count == 0
    assert len(cancels) == 0


def test_a_refusal_ends_all_sequences_at_once() -> None:
    cancels, free = watch()
    cancels.sent(1, 4)
    cancels.cancelled(1, 1.0)
    cancels.ended(1, 1.5, whole=True)
    assert free.distribution.counts == (1, 0, 0)
    assert len(cancels) == 0


def test_a_broken_stream_leaves_nothing() -> None:
    cancels, free = watch()
    cancels.sent(1, 1)
    cancels.cancelled(1, 1.0)
    cancels.clear()
    cancels.ended(1, 2.0)
    assert free.distribution.count == 0
    assert len(cancels) == 0
