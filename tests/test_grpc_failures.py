"""How refusals, failures, cancels and deadlines travel to gRPC clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cluster.rpc.front import is_of_this_host
from planner.errors import NeverFits, QueueFull, RequestFailed, Unavailable, WorkerLost
from protos import inference_pb2 as pb
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import failure, grpc_desk, request, text_of, trailer
from tests.http_desk import MODEL, VOCAB, says

SERVING = health_pb2.HealthCheckResponse.SERVING


async def wait_until_idle(fleet: FakeFleet) -> None:
    async with asyncio.timeout(2):
        while fleet.num_running:  # noqa: ASYNC110 - the fake fleet has no event for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"ids": [VOCAB]}, "prompt"),
        ({"ids": []}, "prompt"),
        ({"ids": [5] * 65}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"json_schema": "{"}, "json_schema"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [("alien", "hello")]}, "messages"),
        ({"messages": [("user", "hello")], "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_is_an_invalid_argument_that_is_named(fields: Any, param: str) -> None:
    async with grpc_desk() as client:
        error = await failure(client, **fields)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(error, "error-param") == param
        assert 0 < len(error.details() or "") < 1100
        assert client.fleet.requests == []


async def test_no_input_at_all_is_an_invalid_argument() -> None:
    async with grpc_desk() as client:
        with pytest.raises(grpc.aio.AioRpcError, match="prompt is missing") as caught:
            _ = [message async for message in client.inference.Generate(pb.GenerateRequest())]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("inside", [False, True])
async def test_a_field_that_a_newer_client_knows_is_refused_and_not_ignored(inside: bool) -> None:
    newer = b"\xf8\x07\x01"  # field 127, the number 1
    message = pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message(role="user", content="hello")]))
    if inside:
        message.conversation.messages[0].MergeFromString(newer)
    else:
        message.MergeFromString(newer)
    async with grpc_desk() as client:
        with pytest.raises(grpc.aio.AioRpcError, match="no field of number 127") as caught:
            _ = [answer async for answer in client.inference.Generate(message)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_model_is_not_found_and_named() -> None:
    async with grpc_desk() as client:
        error = await failure(client, model="does-not-exist")
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "does-not-exist" in (error.details() or "")
        assert (await client.generate(model="tiny"))[-1].HasField("usage")


@pytest.mark.parametrize(
    ("refusal", "code", "retry"),
    [
        (QueueFull("no room", retry_after_s=2.4), grpc.StatusCode.RESOURCE_EXHAUSTED, "3"),
        (Unavailable("draining"), grpc.StatusCode.UNAVAILABLE, "1"),
        (NeverFits("too long"), grpc.StatusCode.INVALID_ARGUMENT, None),
    ],
)
@pytest.mark.parametrize("later", [False, True])
async def test_a_refusal_has_its_status_and_says_when_to_come_again(
    refusal: Any, code: grpc.StatusCode, retry: str | None, later: bool
) -> None:
    kind = "refusal_later" if later else "refusal_at_submit"
    async with grpc_desk(fleet=FakeFleet(MODEL, says("hi"), **{kind: refusal})) as client:
        error = await failure(client)
        assert (error.code(), trailer(error, "retry-after")) == (code, retry)
        assert trailer(error, "error-code") == refusal.code
        assert error.details() == refusal.message


async def test_a_failure_in_the_middle_comes_after_what_was_generated() -> None:
    fleet = FakeFleet(MODEL, says("hi there"), fail_after=(2, WorkerLost("the worker is gone")))
    async with grpc_desk(fleet=fleet) as client:
        call = client.inference.Generate(request())
        told = [await call.read(), await call.read()]
        assert text_of(told) == "hi"
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # and no message that only carries the status
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert trailer(caught.value, "retry-after") == "1"


async def test_a_fault_of_ours_is_internal_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_request: Any, _index: int) -> list[int]:
        raise KeyError("secret")

    async with grpc_desk(broken) as client:
        error = await failure(client)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the server failed")
    assert "KeyError" in caplog.text


async def test_details_stay_short_whatever_a_client_quotes() -> None:
    async with grpc_desk() as client:
        error = await failure(client, model="é" * 100_000)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert len((error.details() or "").encode()) < 1100


async def test_a_cancelled_call_ends_what_runs_for_it() -> None:
    async with grpc_desk(lambda _request, _index: [7] * 40) as client:
        call = client.inference.Generate(request(max_tokens=40, n=2, ignore_eos=True))
        await call.read()
        client.fleet.gate.clear()
        call.cancel()
        await wait_until_idle(client.fleet)
        assert client.fleet.generations[0].cancelled == {0, 1}
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_no_cancel_is_lost_however_it_falls_between_messages() -> None:
    async with grpc_desk(lambda _request, _index: [7] * 60) as client:

        async def leave_after(delay_s: float) -> None:
            call = client.inference.Generate(request(max_tokens=60, ignore_eos=True))
            await call.read()
            await asyncio.sleep(delay_s)
            call.cancel()

        await asyncio.gather(*(leave_after(0.0002 * i) for i in range(40)))
        client.fleet.gate.clear()
        await wait_until_idle(client.fleet)


async def test_a_clients_deadline_is_the_requests_deadline() -> None:
    async with grpc_desk() as client:
        client.fleet.gate.clear()
        started_at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in client.inference.Generate(request(), timeout=0.2)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started_at < 2
        await wait_until_idle(client.fleet)


async def test_a_deadline_in_metadata_ends_a_request_with_its_own_status() -> None:
    async with grpc_desk() as client:
        client.fleet.gate.clear()
        error = await failure(client, [("x-request-timeout-ms", "50")])
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert trailer(error, "error-code") == "deadline_exceeded"
        assert client.fleet.num_running == 0
        bad = await failure(client, [("x-request-timeout-ms", "soon")])
        assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_key_is_asked_for_where_there_are_keys() -> None:
    async with grpc_desk(api_keys=("k1", "k2")) as client:
        for metadata in ((), [("authorization", "Bearer k3")], [("authorization", "k1")]):
            assert (await failure(client, metadata)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert text_of(await client.generate([("authorization", "Bearer k2")])) == "hi there"
        with pytest.raises(grpc.aio.AioRpcError, match="API key"):
            await client.inference.ListModels(pb.ListModelsRequest())
        checked = await client.health_stub.Check(health_pb2.HealthCheckRequest())
        assert checked.status == SERVING


async def test_a_request_over_the_limit_is_refused_by_its_size() -> None:
    async with grpc_desk(max_body_bytes=1000) as client:
        error = await failure(client, prompt="x" * 1000)
        assert trailer(error, "error-code") == "body_too_large"


async def test_a_failed_sequence_among_others_fails_the_call() -> None:
    fleet = FakeFleet(MODEL, says("hi there"), fail_after=(1, RequestFailed("it broke")))
    async with grpc_desk(fleet=fleet) as client:
        error = await failure(client, n=2)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "it broke")
        assert fleet.num_running == 0


async def test_bytes_that_are_no_message_are_the_clients_fault() -> None:
    async with grpc_desk() as client:
        generate = client.channel.unary_stream("/raycomb.v1.Inference/Generate", None, None)
        tokenize = client.channel.unary_unary("/raycomb.v1.Inference/Tokenize", None, None)
        for broken in (b"\x12\x05he", b"\xff\xff\xff", b"\x01", b"hello"):
            with pytest.raises(grpc.aio.AioRpcError) as streamed:
                _ = [message async for message in generate(broken)]
            with pytest.raises(grpc.aio.AioRpcError) as asked:
                await tokenize(broken)
            for error in (streamed.value, asked.value):
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert trailer(error, "error-code") == "invalid_request"
                assert f"({len(broken)} bytes)" in (error.details() or "")
        assert text_of(await client.generate()) == "hi there"


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:40123", True),
        ("ipv4:127.8.0.1:40123", True),
        ("ipv6:%5B::1%5D:40123", True),
        ("ipv6:[::1]:40123", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:40123", True),
        ("unix:", True),
        ("ipv4:192.0.2.7:40123", False),
        ("ipv6:%5B2001:db8::1%5D:40123", False),
        ("ipv6:%5B::ffff:192.0.2.7%5D:40123", False),
        ("ipv4:localhost:40123", False),
        ("", False),
    ],
)
def test_who_calls_from_this_host(peer: str, is_here: bool) -> None:
    assert is_of_this_host(peer) is is_here
