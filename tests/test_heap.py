"""What lives as long as its process is no work for Python's collector of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cluster.offline.engine import open_offline
from worker.config import EngineConfig
from worker.heap import settle, settled


class Node:
    """May refer to itself, so that only the collector finds that it is gone."""

    def __init__(self) -> None:
        self.itself: Node | None = None


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_settled_is_passed_over_and_goes_all_the_same() -> None:
    kept = Node()
    settle()
    assert gc.get_freeze_count() > 1000
    assert not any(each is kept for each in gc.get_objects())
    gone = weakref.ref(kept)
    del kept
    assert gone() is None


def test_garbage_is_collected_before_anything_settles_and_afterwards() -> None:
    def cycle() -> weakref.ref[Node]:
        node = Node()
        node.itself = node
        return weakref.ref(node)

    before = cycle()
    with settled():
        assert before() is None
        during = cycle()
        gc.collect()
        assert during() is None
    assert gc.get_freeze_count() == 0


def test_an_offline_engine_has_its_process_settled_for_as_long_as_it_lives() -> None:
    with open_offline(EngineConfig(model="any", device="cpu"), "tests.fakes:make_fake_executor") as engine:
        assert engine.info.vocab_size > 0
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
