"""The worker's end of the data plane, over real gRPC in one process."""

from __future__ import annotations

import asyncio

import pytest

from planner.blocks import block_hashes
from planner.errors import ContextLengthExceeded, InvalidRequest, QueueFull, Unavailable
from planner.request import FinishReason, SamplingParams
from protos import worker_pb2 as pb
from tests.data_plane import FOREVER, Gateway, attached, holding, serving
from tests.fakes import expected_tokens, fake_request
from tests.ports import own_ports
from tests.recorder import Recorder


async def test_tokens_come_in_order_and_end_once() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        requests = {key: fake_request(range(1, 10 + key), 12, n=1 + key % 2) for key in range(1, 20)}
        for key, request in requests.items():
            await gateway.submit(key, request)
        for key, request in requests.items():
            for index in range(request.n):
                await gateway.read_ends(key, index=index)
                assert gateway.tokens[key, index] == expected_tokens(request, index)
                assert gateway.ends[key, index].finish_reason is FinishReason.LENGTH
        assert worker.engine.num_live == 0


async def test_the_first_token_arrives_while_the_second_is_made() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=5))
        worker.executor.release(1)
        while (1, 0) not in gateway.tokens:
            await gateway.read()
        assert len(gateway.tokens[1, 0]) == 1
        assert worker.engine.stats.num_steps == 1


async def test_one_message_a_step_carries_all_sequences() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(0, fake_request(max_tokens=FOREVER))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        for key in range(1, 8):
            await gateway.submit(key, fake_request(max_tokens=FOREVER))
        # A refusal is written by the same reader, so the submits before it are in the inbox.
        await gateway.submit(0, fake_request())
        while 0 not in gateway.refusals:
            await gateway.read()
        for step in range(2, 7):
            before = len(gateway.messages)
            worker.executor.release(1)
            await asyncio.to_thread(worker.executor.wait_launched, step)
            while gateway.snapshot is None or gateway.snapshot.step < step - 1:
                await gateway.read()
            news = [message for message in gateway.messages[before:] if message.updates]
            assert len(news) == 1
            if step > 2:
                assert sorted(update.request_id for update in news[0].updates) == list(range(8))
                assert all(len(update.tokens) == 1 for update in news[0].updates)


async def test_a_slow_reader_gets_merged_updates_and_misses_nothing() -> None:
    request = fake_request(range(1, 4), 400, sampling=SamplingParams(logprobs=20))
    async with serving() as worker, attached(worker.address) as gateway:
        watcher = Recorder()
        worker.engine.connect(watcher)
        for key in range(1, 9):
            await gateway.submit(key, request)
        await gateway.read()
        await asyncio.to_thread(watcher.wait, lambda: bool(watcher.reports) and watcher.snapshot.step >= 400)
        await asyncio.to_thread(watcher.wait_quiet)
        await gateway.read_ends(*range(1, 9))
        assert all(gateway.tokens[key, 0] == expected_tokens(request) for key in range(1, 9))
        assert len(gateway.messages) < 20
        longest = max(len(update.tokens) for message in gateway.messages for update in message.updates)
        assert longest > 100


async def test_a_cancel_ends_a_request_or_some_of_its_sequences() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=20, n=3))
        await gateway.submit(2, fake_request(max_tokens=FOREVER))
        await gateway.cancel(2)
        await gateway.cancel(2)
        await gateway.cancel(1, 0, 2)
        await gateway.cancel(77)
        await gateway.submit(2, fake_request())
        while 2 not in gateway.refusals:
            await gateway.read()
        worker.executor.release()
        del gateway.refusals[2]
        for index in range(3):
            await gateway.read_ends(1, index=index)
        await gateway.read_ends(2)
        assert gateway.ends[2, 0].finish_reason is FinishReason.CANCELLED
        assert [gateway.ends[1, index].finish_reason for index in range(3)] == [
            FinishReason.CANCELLED,
            FinishReason.LENGTH,
            FinishReason.CANCELLED,
        ]


async def test_refusals_are_typed_and_the_stream_goes_on() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=5000))
        await gateway.submit(2, fake_request([7777]))
        await gateway.call.write(pb.Command(submit=pb.Submit(request_id=3)))
        await gateway.call.write(pb.Command())
        await gateway.submit(4, fake_request())
        await gateway.read_ends(1, 2, 3, 4)
        assert type(gateway.refusals[1]) is ContextLengthExceeded
        assert type(gateway.refusals[2]) is InvalidRequest
        assert type(gateway.refusals[3]) is InvalidRequest
        assert gateway.refusals[3].param == "sampling"
        assert gateway.tokens[4, 0] == expected_tokens(fake_request())


async def test_a_prompt_over_the_transports_own_limit_is_refused_by_the_planner() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request([999] * 3_000_000))
        await gateway.read_ends(1)
        assert type(gateway.refusals[1]) is ContextLengthExceeded


async def test_a_request_id_in_use_is_refused_and_may_be_used_after_its_end() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request())
        await gateway.submit(1, fake_request())
        while 1 not in gateway.refusals:
            await gateway.read()
        assert "already running" in gateway.refusals.pop(1).message
        worker.executor.release()
        await gateway.read_ends(1)
        assert gateway.tokens.pop((1, 0)) == expected_tokens(fake_request())
        del gateway.ends[1, 0]
        await gateway.submit(1, fake_request())
        await gateway.read_ends(1)
        assert gateway.tokens[1, 0] == expected_tokens(fake_request())


async def test_all_gateways_hear_of_a_request_while_the_step_before_it_runs() -> None:
    """Else each would send others on top of it; a step with prompts takes hundreds of milliseconds."""
    async with (
        serving(holding()) as worker,
        attached(worker.address) as asking,
        attached(worker.address) as other,
    ):
        await other.submit(5, fake_request(max_tokens=FOREVER))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await asking.submit(8, fake_request(range(20), max_tokens=30))
        for gateway in (asking, other):
            while gateway.snapshot is None or gateway.snapshot.queued_prefill_tokens < 20:
                await gateway.read()
            assert (gateway.snapshot.step, gateway.snapshot.num_waiting) == (0, 2)
            assert gateway.snapshot.answer_tokens == FOREVER + 30
        assert (asking.newest_request, other.newest_request) == (8, 5)
        worker.executor.release()
        await asking.read_ends(8)


async def test_a_request_that_has_not_begun_is_given_back_and_one_that_has_goes_on() -> None:
    async with serving(holding(), max_num_seqs=2) as worker, attached(worker.address) as gateway:
        requests = {key: fake_request(range(1, 4 + key), 6, n=2) for key in (1, 2, 3)}
        await gateway.submit(1, requests[1])
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await gateway.submit(2, requests[2])
        await gateway.submit(3, requests[3])
        for key in (3, 1, 9):
            await gateway.recall(key)
        await gateway.submit(1, requests[1])
        await gateway.read_ends(1)
        # That refusal is written by the same reader, so the recalls before it are in the inbox.
        assert isinstance(gateway.refusals.pop(1), InvalidRequest)
        worker.executor.release()
        await gateway.read_ends(1, 2, 3)
        assert isinstance(gateway.refusals.pop(3), Unavailable)
        assert not gateway.refusals
        assert [gateway.tokens[key, 0] for key in (1, 2)] == [expected_tokens(requests[key]) for key in (1, 2)]
        await gateway.submit(3, requests[3])  # its id is free again
        await gateway.read_ends(3, index=1)
        assert gateway.tokens[3, 1] == expected_tokens(requests[3], 1)


async def test_a_request_is_given_back_though_some_of_its_sequences_were_cancelled() -> None:
    async with serving(holding(), max_num_seqs=3) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(n=3))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await gateway.submit(2, fake_request(n=3))
        await gateway.cancel(2, 0, 2)
        await gateway.recall(2)
        await gateway.submit(2, fake_request())
        await gateway.read_ends(2)
        assert isinstance(gateway.refusals.pop(2), InvalidRequest)  # as above, the inbox has the rest
        worker.executor.release()
        await gateway.read_ends(1, 2)
        assert isinstance(gateway.refusals[2], Unavailable)
        assert {key for key, _ in gateway.ends} == {1}


async def test_a_full_inbox_is_a_refusal_that_says_when_to_come_back() -> None:
    async with serving(holding(), inbox_size=1) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request())
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await gateway.submit(2, fake_request())
        await gateway.submit(3, fake_request())
        await gateway.read_ends(3)
        refusal = gateway.refusals[3]
        assert isinstance(refusal, QueueFull)
        assert refusal.retry_after_s > 0


async def test_many_gateways_share_a_worker() -> None:
    async with serving() as worker:

        async def one(number: int) -> None:
            async with attached(worker.address) as gateway:
                for key in range(10):
                    await gateway.submit(key, fake_request([number + 1], 10))
                await gateway.read_ends(*range(10))
                assert all(
                    gateway.tokens[key, 0] == expected_tokens(fake_request([number + 1], 10)) for key in range(10)
                )

        await asyncio.gather(*(one(number) for number in range(4)))


async def test_a_proxy_for_the_world_outside_has_no_part_in_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{own_ports(1)[0]}")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving() as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=3))
        await gateway.read_ends(1)
        assert gateway.ends[1, 0].finish_reason is FinishReason.LENGTH


async def test_a_gateway_hears_at_once_what_is_resident_and_then_what_changes() -> None:
    first, second = fake_request(range(200), 2), fake_request(range(500, 650), 2)
    async with serving() as worker:
        async with attached(worker.address) as gateway:
            await gateway.submit(1, first)
            await gateway.read_ends(1)
            assert resident(gateway) == set(block_hashes(first.prompt))
        async with attached(worker.address) as gateway:
            await gateway.submit(1, second)
            await gateway.read_ends(1)
            assert resident(gateway) == {*block_hashes(first.prompt), *block_hashes(second.prompt)}
            before = [message for message in gateway.messages if message.HasField("blocks")]
            assert set(before[0].blocks.added) == set(block_hashes(first.prompt))


def resident(gateway: Gateway) -> set[int]:
    known: set[int] = set()
    for message in gateway.messages:
        known = (known | set(message.blocks.added)) - set(message.blocks.removed)
    return known
