"""Compiled grammars: one for a grammar that one sequence follows, more where more do, and never too many in all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from worker.compiled_grammars import MAX_COMPILED, CompiledGrammars, Source


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self._permits = threading.Semaphore(0)

    def __call__(self, grammar: str) -> str:
        assert self._permits.acquire(timeout=30)
        self.compiled.append(grammar)
        return f"{grammar}, number {len(self.compiled)}"

    def permit(self, count: int = 1) -> None:
        self._permits.release(count)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(1)
    yield executor
    executor.shutdown(cancel_futures=True)


def settle(background: ThreadPoolExecutor) -> None:
    """Wait for what was submitted."""
    background.submit(lambda: None).result(timeout=30)


def test_a_grammar_is_compiled_once_however_often_it_is_prepared(background: ThreadPoolExecutor) -> None:
    compiler = Compiler()
    compiler.permit(10)
    grammars = CompiledGrammars(compiler, background, max_sources=4)
    for _ in range(3):
        grammars.prepare("a")
        grammars.give_back(grammars.take("a"))
        settle(background)
    assert compiler.compiled == ["a"]


def test_what_is_used_by_two_is_compiled_again_and_the_next_one_takes_that(background: ThreadPoolExecutor) -> None:
    compiler = Compiler()
    compiler.permit(10)
    grammars = CompiledGrammars(compiler, background, max_sources=4)
    grammars.prepare("a")
    settle(background)
    first, second = grammars.take("a"), grammars.take("a")
    assert first is second
    settle(background)
    assert grammars.is_crowded("a", first)
    third = grammars.take("a")
    assert third is not first
    assert third.compiled.result() != first.compiled.result()


def test_nobody_waits_for_a_second_compilation(background: ThreadPoolExecutor) -> None:
    compiler = Compiler()
    compiler.permit()
    grammars = CompiledGrammars(compiler, background, max_sources=4)
    grammars.prepare("a")
    settle(background)
    taken = [grammars.take("a") for _ in range(5)]
    assert all(source is taken[0] and source.compiled.done() for source in taken)
    assert not grammars.is_crowded("a", taken[0])
    compiler.permit(10)


def test_users_are_spread_evenly_over_as_many_as_there_may_be(background: ThreadPoolExecutor) -> None:
    compiler = Compiler()
    compiler.permit(100)
    grammars = CompiledGrammars(compiler, background, max_sources=4)
    held = [grammars.take("a") for _ in range(32)]
    for _ in range(10):  # as rows do that are asked for their masks again and again
        settle(background)
        for place, source in enumerate(held):
            if grammars.is_crowded("a", source):
                grammars.give_back(source)
                held[place] = grammars.take("a")
    sources = {id(source): source for source in held}
    assert sorted(source.num_users for source in sources.values()) == [8, 8, 8, 8]
    assert compiler.compiled == ["a"] * 4
    assert not any(grammars.is_crowded("a", source) for source in held)


def test_the_least_recently_used_are_forgotten_and_their_users_keep_what_they_have(
    background: ThreadPoolExecutor,
) -> None:
    compiler = Compiler()
    compiler.permit(10 * MAX_COMPILED)
    grammars = CompiledGrammars(compiler, background, max_sources=2)
    first: Source[str] = grammars.take("first")
    for number in range(MAX_COMPILED):
        grammars.prepare(str(number))
    settle(background)
    assert first.compiled.result() == "first, number 1"
    assert not grammars.is_crowded("first", first)
    grammars.give_back(first)
    grammars.prepare("first")
    settle(background)
    assert compiler.compiled.count("first") == 2


def test_idle_copies_make_room_before_any_grammar_is_forgotten_and_none_is_made_where_there_is_no_room(
    background: ThreadPoolExecutor,
) -> None:
    compiler = Compiler()
    compiler.permit(10 * MAX_COMPILED)
    grammars = CompiledGrammars(compiler, background, max_sources=2)
    taken = [grammars.take("busy"), grammars.take("busy")]
    settle(background)
    for source in taken:
        grammars.give_back(source)
    for number in range(MAX_COMPILED - 1):
        grammars.prepare(str(number))
    settle(background)
    assert compiler.compiled.count("busy") == 2
    grammars.take("busy")
    grammars.take("busy")
    for number in range(MAX_COMPILED - 1):
        grammars.prepare(str(number))
    settle(background)
    assert len(compiler.compiled) == MAX_COMPILED + 1, "nothing was forgotten, and nothing compiled again"
