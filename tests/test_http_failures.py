"""Refusals, failures and deadlines: each has its own status, and frees what it held."""

from __future__ import annotations

import asyncio
from typing import Any

from planner.errors import ForwardFailed, NoTokenLeft, QueueFull, Unavailable, WorkerLost
from planner.request import FinishReason, Request, Update
from tests.fake_fleet import FakeFleet
from tests.http_desk import (
    CHAT,
    MODEL,
    PROMPT,
    TEXT,
    RawClient,
    desk,
    endings,
    joined,
    parse_events,
    refusal,
    says,
    until,
)


async def test_a_refusal_has_its_own_status_streaming_or_not() -> None:
    for refused in (QueueFull("full", retry_after_s=2.5), Unavailable("none left")):
        for later in (False, True):
            fleet = FakeFleet(MODEL, says("x"))
            if later:
                fleet.refusal_later = refused
            else:
                fleet.refusal_at_submit = refused
            async with desk(fleet=fleet) as d:
                for stream in (False, True):
                    answer = await d.post("/v1/completions", **PROMPT, stream=stream)
                    status = 429 if isinstance(refused, QueueFull) else 503
                    assert refusal(answer, status)["code"] == refused.code
                    assert answer.headers["retry-after"] == ("3" if status == 429 else "1")


async def test_one_refused_prompt_of_a_batch_frees_the_others() -> None:
    class SecondIsRefused(FakeFleet):
        def submit(self, request: Request) -> Any:
            if self.generations:
                raise QueueFull("full")
            return super().submit(request)

    async with desk(fleet=SecondIsRefused(MODEL, says("x"))) as d:
        refusal(await d.post("/v1/completions", prompt=["a", "b"], max_tokens=4), 429)
    assert d.fleet.generations[0].cancelled == {0}


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    fleet = FakeFleet(MODEL, says("x"), fail_after=(0, WorkerLost("gone")))
    async with desk(fleet=fleet) as d:
        for stream in (False, True):
            assert refusal(await d.post("/v1/completions", **PROMPT, stream=stream), 503)["code"] == "worker_lost"


async def test_a_dead_end_is_the_requests_own_fault_and_names_the_field() -> None:
    fleet = FakeFleet(MODEL, says("hello there"), fail_after=(0, NoTokenLeft("nothing is left", param="bad_words")))
    async with desk(fleet=fleet) as d:
        error = refusal(await d.post("/v1/completions", **PROMPT), 400)
        fleet.fail_after = (1, NoTokenLeft("nothing is left", param="bad_words"))
        *_, last = await d.events("/v1/chat/completions", **CHAT)
    assert error == last["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "bad_words", "no_token_left")


async def test_a_stream_that_fails_says_so_and_ends() -> None:
    fleet = FakeFleet(MODEL, says("hello there"), fail_after=(2, ForwardFailed("it broke")))
    async with desk(fleet=fleet) as d:
        events = await d.events("/v1/chat/completions", **CHAT, n=2)
        whole = await d.post("/v1/chat/completions", **CHAT, n=2)
    assert events[-1]["error"] == {
        "message": "it broke",
        "type": "server_error",
        "param": None,
        "code": "forward_failed",
    }
    assert endings(events[:-1]) == {0: [], 1: []}
    assert joined(events[:-1]) == "hello "
    refusal(whole, 500)


async def test_a_deadline_ends_the_request_and_frees_it() -> None:
    fleet = FakeFleet(MODEL, says("x"), gate=asyncio.Event())
    async with desk(fleet=fleet) as d:
        answer = await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-timeout-ms": "20"})
        bad = [
            await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-timeout-ms": value})
            for value in ("abc", "-1", "0", "1.5")
        ]
    assert refusal(answer, 408)["code"] == "deadline_exceeded"
    assert fleet.num_running == 0
    for one in bad:
        assert refusal(one)["param"] == "x-request-timeout-ms"


async def test_a_deadline_that_passes_within_a_stream_is_its_last_event() -> None:
    fleet = FakeFleet(MODEL, says("abcdef" * 20, ends=False))
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {**PROMPT, "max_tokens": 50, "stream": True}, deadline_ms=30)
        serving = asyncio.create_task(client.run())
        await until(lambda: len(client.sent) >= 2)
        fleet.gate.clear()
        await asyncio.wait_for(serving, 5)
    events = parse_events(b"".join(message.get("body", b"") for message in client.sent).decode())
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert fleet.num_running == 0


async def test_a_deadline_that_passes_while_a_whole_answer_is_sent_starts_no_second_one() -> None:
    class ReadsLate(RawClient):
        async def send(self, message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) == 1:
                await asyncio.sleep(0.1)

    async with desk() as d:
        client = ReadsLate(d.app, PROMPT, deadline_ms=40)
        await client.run()
    assert [(message["type"], message.get("status")) for message in client.sent] == [
        ("http.response.start", 200),
        ("http.response.body", None),
    ]


async def test_what_was_generated_before_a_failure_is_still_told() -> None:
    class TokensThenFailure(FakeFleet):
        def submit(self, request: Request) -> Any:
            return OneUpdate(TEXT.encode("hello"))

    class OneUpdate:
        def __init__(self, tokens: list[int]) -> None:
            self.tokens = tuple(tokens)

        async def next(self) -> list[Update]:
            error = WorkerLost("gone")
            return [Update(0, 0, self.tokens, finish_reason=FinishReason.FAILED, error=error)]

        def cancel(self, indices: object = None) -> None:
            assert indices is None

    async with desk(fleet=TokensThenFailure(MODEL, says("x"))) as d:
        events = await d.events("/v1/completions", **PROMPT)
    assert joined(events[:-1]) == "hello"
    assert events[-1]["error"]["code"] == "worker_lost"


async def test_a_request_that_the_server_gives_up_is_no_success() -> None:
    class GivenUp(FakeFleet):
        def submit(self, request: Request) -> Any:
            return Cancelled()

    class Cancelled:
        async def next(self) -> list[Update]:
            return [Update(0, 0, finish_reason=FinishReason.CANCELLED)]

        def cancel(self, indices: object = None) -> None:
            assert indices is None

    async with desk(fleet=GivenUp(MODEL, says("x"))) as d:
        assert refusal(await d.post("/v1/completions", **PROMPT), 500)["code"] == "failed"


async def test_a_huge_name_is_not_told_back_in_full() -> None:
    async with desk() as d:
        for body in ({**PROMPT, "model": "m" * 100_000}, {**PROMPT, "f" * 100_000: 1}):
            answer = await d.post("/v1/completions", **body)
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 4096
