"""What clients agree with the service beside their request, over HTTP and gRPC: deadline, tenant and priority."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from cluster.access.key_ring import KeyRing
from cluster.api_settings import ApiSettings
from cluster.headers import DEADLINE, TENANT, terms
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.run import continuation
from cluster.routing.streams import Streams
from planner.errors import DeadlineUnmeetable, InvalidRequest
from planner.request import FinishReason, Request
from tests.data_plane import SECRET, Worker, serving
from tests.fake_fleet import FakeFleet
from tests.fakes import FakeExecutor, fake_info
from tests.grpc_desk import grpc_desk
from tests.http_desk import CHAT, MODEL, PROMPT, VOCAB, Desk, desk, refusal, says, until


def account_of_key(key: str) -> str:
    use = KeyRing(ApiSettings(api_keys=(key,))).find(f"Bearer {key}")
    assert use is not None
    return use.tenant


LONG = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_the_nearest_of_several_deadlines_holds() -> None:
    agreed = terms(["5000", "90000"], [], "")
    assert agreed.left_s is not None
    assert 4.5 < agreed.left_s <= 5.0
    assert terms(["99999999999"], [], "").left_s is None
    assert terms([], [], "").deadline is None


@pytest.mark.parametrize("tenants", [[""], ["two words"], ["é"], ["x" * 65], ["a", "b"]])
def test_a_tenant_that_is_no_name_is_refused(tenants: list[str]) -> None:
    with pytest.raises(InvalidRequest) as told:
        terms([], tenants, "account")
    assert told.value.param == TENANT


def test_what_goes_on_elsewhere_keeps_tenant_and_deadline() -> None:
    rest = continuation(Request(np.array([1]), 9, tenant="acme", deadline=7.5), 0, [4, 5])
    assert (rest.tenant, rest.deadline, rest.num_generated) == ("acme", 7.5, 2)


async def test_the_header_says_whose_request_it_is_and_the_key_does_where_it_is_silent() -> None:
    key = {"authorization": "Bearer k1"}
    async with desk(api_keys=("k1",)) as d:
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {TENANT: "acme"})
        await d.http.post("/v1/chat/completions", json=CHAT, headers=key)
        bad = await d.http.post("/v1/completions", json=PROMPT, headers=key | {TENANT: "a b"})
    assert [request.tenant for request in d.fleet.requests] == ["acme", account_of_key("k1")]
    assert refusal(bad)["param"] == TENANT


async def test_without_keys_an_authorization_says_nothing() -> None:
    async with desk() as d:
        await d.http.post("/v1/completions", json=PROMPT, headers={"authorization": "Bearer made-up"})
    assert d.fleet.requests[0].tenant == ""


async def test_a_service_may_go_by_the_keys_alone() -> None:
    key = {"authorization": "Bearer k1"}
    async with desk(api_keys=("k1",), tenant_from_header=False) as d:
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {TENANT: "somebody else"})
    assert d.fleet.requests[0].tenant == account_of_key("k1")


async def test_deadline_tenant_and_priority_go_to_the_worker_with_every_prompt() -> None:
    async with desk() as d:
        body = {"prompt": ["a", "b"], "max_tokens": 4, "priority": -3}
        await d.http.post("/v1/completions", json=body, headers={DEADLINE: "60000", TENANT: "acme"})
    for request in d.fleet.requests:
        assert (request.tenant, request.priority) == ("acme", -3)
        assert request.deadline is not None
        assert 50 < request.deadline - time.monotonic() <= 60


async def test_the_same_goes_for_grpc() -> None:
    async with grpc_desk() as d:
        await d.generate(metadata=((TENANT, "acme"), (DEADLINE, "60000")), priority=2, max_tokens=4)
        await d.generate(max_tokens=4)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await d.generate(metadata=((TENANT, "a b"),))
    first, second = d.fleet.requests
    assert (first.tenant, first.priority, second.tenant, second.deadline) == ("acme", 2, "", None)
    assert first.deadline is not None
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_deadline_that_cannot_be_met_has_the_status_of_one_that_passed_and_says_when_to_come_again() -> None:
    refused = DeadlineUnmeetable("too slow", retry_after_s=7.2)
    async with desk(fleet=FakeFleet(MODEL, says("x"), refusal_later=refused)) as d:
        answer = await d.post("/v1/completions", **PROMPT)
    assert refusal(answer, 408)["code"] == "deadline_unmeetable"
    assert answer.headers["retry-after"] == "8"
    async with grpc_desk(fleet=FakeFleet(MODEL, says("x"), refusal_later=refused)) as g:
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await g.generate()
    assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ("retry-after", "8") in tuple(told.value.trailing_metadata() or ())


@asynccontextmanager
async def whole_service(executor: FakeExecutor, **limits: Any) -> AsyncIterator[tuple[Desk, Worker]]:
    """HTTP in front, one engine behind a real stream."""
    async with serving(executor, **limits) as worker:
        streams = Streams("tiny", SECRET, Router(max_waiting=16))
        streams.set_members({"worker-1": Member("worker-1", worker.address)})
        try:
            await until(lambda: streams.ready)
            async with desk(fleet=streams) as d:
                yield d, worker
        finally:
            await streams.close()


def slow() -> FakeExecutor:
    return FakeExecutor(fake_info(vocab_size=VOCAB), step_time_s=0.01)


async def test_a_deadline_ends_an_answer_everywhere() -> None:
    async with whole_service(slow()) as (d, worker):
        began = time.monotonic()
        whole = await d.http.post("/v1/completions", json=LONG, headers={DEADLINE: "300"})
        streamed = await d.http.post("/v1/completions", json=LONG | {"stream": True}, headers={DEADLINE: "300"})
        assert time.monotonic() - began < 3
        assert refusal(whole, 408)["code"] == "deadline_exceeded"
        assert "deadline_exceeded" in streamed.text.split("\n\n")[-2]
        await until(lambda: worker.engine.num_live == 0 and worker.engine.snapshot.owned_cells == 0)
        assert worker.engine.metrics.finished == {FinishReason.FAILED: 2}  # it was the worker that ended them


async def test_a_queue_full_of_tokens_is_a_429_that_says_when_to_come_again() -> None:
    executor = slow()
    async with whole_service(executor, max_num_seqs=1, max_waiting_tokens=40) as (d, worker):
        executor.hold()
        body = {"prompt": [1] * 30, "max_tokens": 2}
        asking = []
        for number in range(2):  # one runs, one waits
            asking.append(asyncio.create_task(d.post("/v1/completions", **body)))
            await until(lambda number=number: worker.engine.num_live == number + 1)
            await until(lambda: len(executor.steps) == 1)
        refused = asyncio.create_task(d.post("/v1/completions", **body))
        await until(lambda: worker.engine.num_live == 3)
        executor.release()
        answer = await refused
        assert refusal(answer, 429)["code"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert [(await task).status_code for task in asking] == [200, 200]


async def test_what_waits_beyond_its_deadline_is_never_computed() -> None:
    async with whole_service(slow(), max_num_seqs=1) as (d, worker):
        running = asyncio.create_task(d.post("/v1/completions", **LONG | {"prompt": "a", "max_tokens": 80}))
        await until(lambda: worker.engine.snapshot.num_running == 1)
        late = await d.http.post("/v1/completions", json=PROMPT, headers={DEADLINE: "100"})
        refusal(late, 408)
        num_prompt = (await running).json()["usage"]["prompt_tokens"]
        assert worker.engine.metrics.num_prompt_tokens_computed == num_prompt


async def test_priority_and_then_tenants_decide_whose_answer_comes_first() -> None:
    executor = slow()
    async with whole_service(executor, max_num_seqs=1) as (d, worker):
        order: list[str] = []

        async def ask(name: str, tenant: str, priority: int) -> None:
            body = PROMPT | {"priority": priority, "ignore_eos": True}
            answer = await d.http.post("/v1/completions", json=body, headers={TENANT: tenant})
            assert answer.status_code == 200
            order.append(name)

        executor.hold()
        asking = [asyncio.create_task(ask("first", "flood", 0))]
        await until(lambda: len(executor.steps) == 1)
        names = ("flood 1", "flood", 0), ("flood 2", "flood", 0), ("other", "other", 0), ("urgent", "flood", -1)
        for number, who in enumerate(names, 1):
            asking.append(asyncio.create_task(ask(*who)))
            await until(lambda number=number: worker.engine.num_live == number + 1)
        executor.release()
        await asyncio.gather(*asking)
    assert order == ["first", "urgent", "other", "flood 1", "flood 2"]


def test_a_request_keeps_to_the_length_of_a_tenants_name() -> None:
    with pytest.raises(InvalidRequest):
        Request(np.array([1]), 1, tenant="x" * 65)
