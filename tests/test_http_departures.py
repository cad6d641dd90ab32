"""Clients that leave, lag or wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fake_fleet import FakeFleet
from tests.http_desk import (
    MODEL,
    PROMPT,
    RawClient,
    desk,
    joined,
    parse_events,
    says,
    until,
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
async def test_a_client_that_leaves_ends_every_sequence_at_once(stream: bool, running: bool) -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False))
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {"prompt": ["x", "y"], "n": 3, "max_tokens": 50, "stream": stream})
        fleet.gate.clear()
        serving = asyncio.create_task(client.run())
        await until(lambda: len(fleet.generations) == 2)
        if running:
            fleet.gate.set()
            await asyncio.sleep(0)
            await until(lambda: not stream or bool(client.sent))
            fleet.gate.clear()
        client.leave.set()
        await asyncio.wait_for(serving, 5)
    assert fleet.num_running == 0
    if not stream:
        assert not client.sent


async def test_a_client_gone_before_the_start_costs_nothing() -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False), gate=asyncio.Event())
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {"prompt": "x", "max_tokens": 50})
        client.leave.set()
        await asyncio.wait_for(client.run(), 5)
    assert fleet.num_running == 0


async def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    fleet = FakeFleet(MODEL, says("a" * 40, ends=False))
    async with desk(fleet=fleet) as d:
        lazy = RawClient(d.app, {"prompt": "x", "max_tokens": 40, "stream": True})
        lazy.reads.clear()
        serving = asyncio.create_task(lazy.run())
        await until(lambda: bool(fleet.generations))
        others = [await d.post("/v1/completions", **PROMPT) for _ in range(4)]
        assert [answer.status_code for answer in others] == [200] * 4
        assert fleet.num_running == 1, "an unread stream is not drained into a buffer"
        lazy.reads.set()
        await asyncio.wait_for(serving, 5)
    events = parse_events(b"".join(m.get("body", b"") for m in lazy.sent).decode())
    assert joined(events) == "a" * 40


async def test_the_first_token_is_written_before_the_second_exists() -> None:
    fleet = FakeFleet(MODEL, says("abcdef", ends=False), gate=asyncio.Event())

    class OneStep(asyncio.Event):
        async def wait(self) -> Any:
            await super().wait()
            self.clear()
            return True

    fleet.gate = OneStep()
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {**PROMPT, "stream": True})
        serving = asyncio.create_task(client.run())
        fleet.gate.set()
        await until(lambda: len(client.sent) >= 2)
        assert b'"text":"ab"' in client.sent[1]["body"]
        client.leave.set()
        await asyncio.wait_for(serving, 5)


async def test_a_silent_stream_says_that_it_lives() -> None:
    fleet = FakeFleet(MODEL, says("hi"), gate=asyncio.Event())
    async with desk(fleet=fleet, keepalive_s=0.01) as d:
        client = RawClient(d.app, {**PROMPT, "stream": True})
        serving = asyncio.create_task(client.run())
        await until(lambda: len(client.sent) >= 3)
        assert client.sent[1]["body"].startswith(b":")
        fleet.gate.set()
        await asyncio.wait_for(serving, 5)
    events = parse_events(b"".join(m.get("body", b"") for m in client.sent).decode())
    assert joined(events) == "hi"
