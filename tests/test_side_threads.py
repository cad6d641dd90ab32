"""Long work leaves the event loop free, and the line in front of it is short."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pydantic import BaseModel

from cluster.language.side_threads import SideThreads
from planner.errors import QueueFull


async def test_short_work_stays_on_the_loop_and_long_work_leaves_it() -> None:
    threads = SideThreads(inline_size=10, num_threads=1, max_waiting=0)
    assert await threads.run(10, threading.get_ident) == threading.get_ident()
    assert await threads.run(11, threading.get_ident) != threading.get_ident()


async def test_work_is_as_long_as_everything_in_it() -> None:
    class Said(BaseModel):
        text: str
        more: list[dict[str, str]]

    threads = SideThreads(inline_size=100, num_threads=1, max_waiting=0)
    assert threads.size_of("abc", None, 1) == 5
    assert threads.size_of(Said(text="abc", more=[{"de": "f"}])) == 7
    assert threads.size_of([Said(text="", more=[{"a": "x" * 98}])]) > 100
    assert threads.size_of({"deep": [[{"deeper": "x" * 101}]]}) > 100
    assert threads.size_of([[]] * 101) > 100


async def test_the_line_is_bounded_and_moves_on() -> None:
    threads = SideThreads(inline_size=0, num_threads=1, max_waiting=1)
    hold = threading.Event()
    first, second = (asyncio.create_task(threads.run(1, hold.wait)) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await threads.run(1, hold.wait)
    hold.set()
    assert await first
    assert await second
    assert await threads.run(1, lambda: "free again") == "free again"


async def test_one_who_leaves_the_line_gives_up_the_place() -> None:
    threads = SideThreads(inline_size=0, num_threads=1, max_waiting=1)
    hold = threading.Event()
    first, second = (asyncio.create_task(threads.run(1, hold.wait)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = asyncio.create_task(threads.run(1, lambda: 3))
    hold.set()
    assert await first
    assert await third == 3


async def test_work_that_nobody_waits_for_any_more_keeps_its_place_until_it_ends() -> None:
    threads = SideThreads(inline_size=0, num_threads=1, max_waiting=0)
    begun, hold = threading.Event(), threading.Event()
    given_up = asyncio.create_task(threads.run(1, lambda: (begun.set(), hold.wait())))
    await asyncio.to_thread(begun.wait)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(QueueFull):
        await threads.run(1, lambda: None)
    hold.set()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await threads.run(1, lambda: "free again") == "free again"
            except QueueFull:
                await asyncio.sleep(0.001)
            else:
                break


async def test_what_the_work_raises_comes_back() -> None:
    threads = SideThreads(inline_size=0, num_threads=1, max_waiting=0)
    with pytest.raises(ZeroDivisionError):
        await threads.run(1, lambda: 1 / 0)


async def test_what_was_let_in_waits_behind_a_full_line_and_is_not_refused() -> None:
    threads = SideThreads(inline_size=10, num_threads=1, max_waiting=0)
    hold = threading.Event()
    first = asyncio.create_task(threads.run(11, hold.wait))
    await asyncio.sleep(0)
    admitted = [asyncio.create_task(threads.run_admitted(11, threading.get_ident)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await threads.run_admitted(10, threading.get_ident) == threading.get_ident()
    with pytest.raises(QueueFull):
        await threads.run(11, lambda: None)
    hold.set()
    assert await first
    assert threading.get_ident() not in await asyncio.gather(*admitted)


async def test_sizes_are_added_up_no_further_than_it_takes() -> None:
    threads = SideThreads(inline_size=10, num_threads=1, max_waiting=0)
    sizes = iter([4, 6, 1, 100])
    assert threads.total(sizes) == 11
    assert list(sizes) == [100]
    assert threads.total([]) == 0
