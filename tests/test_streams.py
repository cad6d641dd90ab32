"""A gateway's streams to workers, over real gRPC, with a scripted worker at the other end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import numpy as np
import pytest

from cluster.routing.failover import FailoverLimits
from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Member, MembershipBoard, members_of
from cluster.routing.outbox import Outbox
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from planner.blocks import block_hashes
from planner.errors import NeverFits, QueueFull, Unavailable, WorkerLost
from planner.request import FinishReason, Request, Update
from protos import worker_pb2 as pb
from tests.ports import own_ports
from tests.scripted_worker import SECRET, ScriptedWorker, fleet_of, request, tokens, until


async def test_a_request_reaches_the_worker_and_its_updates_come_back() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        command = await worker.heard()
        assert list(command.submit.prompt) == [1, 2, 3]
        worker.say(tokens(5))
        assert [u.tokens for u in await generation.next()] == [(5,)]
        worker.say(tokens(6, finish=FinishReason.STOP))
        (last,) = await generation.next()
        assert (last.tokens, last.finish_reason) == ((6,), FinishReason.STOP)
        assert streams.num_live == 0


async def test_a_late_reader_finds_one_merged_update_for_each_index() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request(n=2))
        await worker.heard()
        for token in range(4):
            worker.say(tokens(token), tokens(10 + token, index=1))
        worker.say(tokens(4, finish=FinishReason.LENGTH))
        await until(lambda: generation._runs.keys() == {1})
        updates = await generation.next()
        assert [(u.index, u.tokens, u.finish_reason) for u in updates] == [
            (0, (0, 1, 2, 3, 4), FinishReason.LENGTH),
            (1, (10, 11, 12, 13), None),
        ]


async def test_a_refusal_is_raised_by_next_and_leaves_nothing() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request(n=3))
        await worker.heard()
        worker.say(NeverFits("needs 12 cells of 10"))
        with pytest.raises(NeverFits, match="12 cells"):
            await generation.next()
        assert streams.num_live == 0


async def test_cancel_is_sent_and_silences_what_still_comes() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        generation.cancel()
        assert (await worker.heard()).cancel == pb.Cancel(request_id=1)
        worker.say(tokens(5, finish=FinishReason.CANCELLED))
        assert await generation.next() == []
        assert streams.num_live == 0


async def test_nothing_is_kept_of_a_request_that_was_cancelled_before_it_was_sent() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        (stream,) = streams._tasks.values()
        for _ in range(3):
            streams.submit(request(n=2)).cancel()
        assert len(stream._runs._cancels) == 0
        kept = streams.submit(request())
        assert (await worker.heard()).submit.request_id == 4
        assert len(stream._runs._cancels) == 1
        kept.cancel()
        assert (await worker.heard()).cancel.request_id == 4


async def test_cancel_of_one_index_leaves_the_others_running() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request(n=3))
        await worker.heard()
        generation.cancel([1])
        generation.cancel([1])
        assert list((await worker.heard()).cancel.indices) == [1]
        worker.say(tokens(7, index=1), tokens(8, index=2))
        assert [u.index for u in await generation.next()] == [2]
        generation.cancel()
        assert list((await worker.heard()).cancel.indices) == []
        assert worker.commands.empty()


async def test_a_generation_that_nobody_holds_is_cancelled() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        del generation
        gc.collect()
        assert (await worker.heard()).cancel.request_id == 1
        assert streams.num_live == 0


async def test_a_worker_that_is_gone_takes_nothing_while_another_goes_on() -> None:
    lost, kept = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, kept) as streams:
        await lost.stop()
        await until(lambda: [info.worker_id for info in streams._router.infos] == ["b"])
        for _ in range(3):
            streams.submit(request()).cancel()
        assert lost.commands.empty()


async def test_a_retired_worker_finishes_what_runs_and_gets_nothing_new() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        streams.set_succession(possible=False)
        streams.set_members({})
        assert not streams.ready
        with pytest.raises(Unavailable):
            streams.submit(request())
        worker.say(tokens(5))
        assert [u.tokens for u in await generation.next()] == [(5,)]
        assert worker.attached == 1
        worker.say(tokens(6, finish=FinishReason.STOP))
        assert [u.finish_reason for u in await generation.next()] == [FinishReason.STOP]
        await until(lambda: worker.attached == 0)
        await until(lambda: not streams._tasks)


async def test_where_all_workers_leave_at_once_what_waits_there_stays_there() -> None:
    workers = [ScriptedWorker("a"), ScriptedWorker("b")]
    async with fleet_of(*workers) as streams:
        asked = [streams.submit(request()) for _ in range(2)]
        submits = [(worker, (await worker.heard()).submit) for worker in workers]
        streams.set_members({})
        await asyncio.sleep(0.05)
        assert all(worker.commands.empty() for worker in workers)
        for worker, submit in submits:
            worker.say(tokens(7, finish=FinishReason.STOP), request_id=submit.request_id)
        for generation in asked:
            assert [update.tokens for update in await generation.next()] == [(7,)]


async def test_a_draining_worker_makes_the_fleet_not_ready() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        worker.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=1, draining=True))
        await until(lambda: not streams.ready)


@pytest.mark.parametrize("leaves", ["drains", "is no member any more"])
async def test_a_request_between_the_last_of_the_old_workers_and_the_first_of_the_new_waits(leaves: str) -> None:
    old, new = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(old) as streams:
        if leaves == "drains":
            old.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=1, draining=True))
        else:
            streams.set_members({})
        await until(lambda: not streams.ready)
        generation = streams.submit(request())
        await asyncio.sleep(0.2)
        streams.set_members({"b": await new.start()})
        command = await asyncio.wait_for(new.commands.get(), 10)
        new.say(tokens(6, finish=FinishReason.STOP), request_id=command.submit.request_id)
        assert [update.tokens for update in await generation.next()] == [(6,)]
    await new.stop()


async def test_where_no_worker_follows_a_request_is_refused_when_patience_ends() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker, limits=FailoverLimits(timeout_s=0.3)) as streams:
        worker.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=1, draining=True))
        await until(lambda: not streams.ready)
        generation = streams.submit(request())
        with pytest.raises(Unavailable, match="no worker takes requests now"):
            await generation.next()
        with pytest.raises(Unavailable, match="no worker takes requests now"):
            streams.submit(request())


async def test_where_the_last_worker_was_lost_a_request_is_refused_at_once_though_serve_takes_it_away_later() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        await worker.stop()
        await until(lambda: not streams.ready)
        streams.set_members({})
        with pytest.raises(Unavailable):
            streams.submit(request())


async def test_the_model_is_what_the_smallest_worker_can_do_and_stays_known() -> None:
    async with fleet_of(ScriptedWorker("a", context=512), ScriptedWorker("b", context=256)) as streams:
        model = streams.model
        assert model is not None
        assert (model.name, model.context) == ("served", 256)
        streams.set_members({})
        await until(lambda: not streams._tasks)
        assert streams.model == model


async def test_a_wrong_secret_opens_nothing() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker, secret="guess", wait=False) as streams:
        await asyncio.sleep(0.3)
        assert not streams.ready
        assert worker.attached == 0


async def test_a_port_that_went_to_another_worker_is_not_joined() -> None:
    worker = ScriptedWorker(name="another")
    async with fleet_of(worker, wait=False) as streams:
        await until(lambda: worker.num_streams > 0)  # it is left again at once
        await asyncio.sleep(0.1)
        assert not streams.ready


async def test_a_worker_that_comes_late_is_found() -> None:
    worker = ScriptedWorker()
    member = await worker.start()
    await worker.stop()
    streams = Streams("served", SECRET, Router(max_waiting=16))
    streams.set_members({"w0": member})
    try:
        await asyncio.sleep(0.2)
        assert streams.model is None
        await worker.start()
        await until(lambda: streams.ready)
    finally:
        await streams.close()
        await worker.stop()


async def test_closing_ends_everything() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await streams.close()
        (update,) = await generation.next()
        assert isinstance(update.error, WorkerLost)
        assert streams.num_live == 0


@pytest.mark.parametrize("turns", range(4))
async def test_a_stream_that_is_ended_as_the_worker_says_hello_ends(turns: int) -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def messages() -> AsyncIterator[pb.StepUpdates]:
            await said
            yield pb.StepUpdates(info=worker.info)
            await asyncio.Event().wait()

        reading = asyncio.create_task(streams._streams["w0"]._read(messages()))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        said.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=1)
        assert done
        assert reading.cancelled()


async def test_a_fault_of_the_writer_is_known_at_once() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        (stream,) = streams._tasks.values()
        stream._runs.outbox.cancel("no number", [1])  # type: ignore[arg-type]
        await until(lambda: streams.fault is not None)
        assert isinstance(streams.fault, TypeError)
        assert streams.num_live == 1  # what ran there waits for another worker
        generation.cancel()


async def test_the_outbox_is_bounded_and_forgets_what_was_cancelled_in_time() -> None:
    outbox = Outbox(max_submits=2)
    outbox.submit(pb.Submit(request_id=1))
    outbox.submit(pb.Submit(request_id=2))
    with pytest.raises(QueueFull):
        outbox.submit(pb.Submit(request_id=3))
    outbox.cancel(2, [0])
    outbox.cancel(2, None)
    outbox.submit(pb.Submit(request_id=3))
    outbox.cancel(3, [1])
    outbox.cancel(3, [0])
    taken = [await outbox.take() for _ in range(3)]
    assert [c.submit.request_id for c in taken[:2]] == [1, 3]
    assert list(taken[2].cancel.indices) == [0, 1]


async def test_a_cancel_while_the_reader_waits_wakes_it() -> None:
    generation = RemoteGeneration(1, request())
    reader = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    generation.cancel()
    assert await reader == []


async def test_a_cancel_keeps_the_unread_end_of_another_index() -> None:
    sent: list[object] = []
    generation = RemoteGeneration(1, request(n=2))
    generation.first_run.start(sent.append)
    generation.first_run.deliver(tokens(5, finish=FinishReason.STOP))
    generation.cancel([1])
    assert sent == [None]
    assert [u.finish_reason for u in await generation.next()] == [FinishReason.STOP]


def test_a_subscriber_hears_the_membership_as_it_is_and_as_it_changes() -> None:
    board = MembershipBoard()
    board.publish("app/Worker", members_of([{"worker_id": "a", "address": "h:1"}, {}]))
    heard: list[list[str]] = []
    unsubscribe = board.subscribe("app/Worker", lambda members: heard.append(sorted(members)))
    board.publish("app/Worker", {})
    board.publish("other/Worker", members_of([{"worker_id": "b", "address": "h:2"}]))
    unsubscribe()
    board.publish("app/Worker", members_of([{"worker_id": "c", "address": "h:3"}]))
    assert heard == [["a"], []]


async def test_a_worker_hears_that_its_messages_were_read_once_their_readers_had_them() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        for token in (7, 8, 9):
            worker.say(tokens(token))
        got: list[int] = []
        while len(got) < 3:
            got += [token for update in await generation.next() for token in update.tokens]
        await until(lambda: worker.num_read == 3)
        assert got == [7, 8, 9]


async def test_a_worker_that_comes_back_while_its_old_stream_drains_keeps_its_new_one() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        generation = streams.submit(request())
        await worker.heard()
        members = {"w0": Member("w0", f"127.0.0.1:{worker.port}")}
        streams.set_members({})
        streams.set_members(members)
        await until(lambda: streams.ready and worker.num_streams == 2)
        generation.cancel()
        await until(lambda: len(streams._tasks) == 1)  # the old stream has ended
        assert streams.ready
        streams.submit(request())


async def test_a_request_waits_for_a_worker_whose_stream_is_being_opened() -> None:
    """As in a rolling update, when the last old worker leaves as the first new one comes."""
    old, new = ScriptedWorker("old"), ScriptedWorker("new")
    async with fleet_of(old) as streams:
        await new.start()
        try:
            streams.set_members({"new": Member("new", f"127.0.0.1:{new.port}")})
            assert not streams.ready
            generation = streams.submit(request())
            await new.heard()
            new.say(tokens(5))
            (update,) = await generation.next()
            assert update.tokens == (5,)
        finally:
            await streams.close()
            await new.stop()


async def test_a_request_that_waited_for_a_stream_that_does_not_open_is_refused() -> None:
    async with fleet_of(ScriptedWorker("old"), limits=FailoverLimits(timeout_s=0.3)) as streams:
        (free,) = own_ports(1)
        streams.set_members({"new": Member("new", f"127.0.0.1:{free}")})
        generation = streams.submit(request())
        with pytest.raises(Unavailable):
            await generation.next()
        assert streams.num_live == 0
        with pytest.raises(Unavailable):
            streams.submit(request())


async def test_what_a_worker_tells_of_its_prefixes_draws_requests_to_it() -> None:
    asked = Request(prompt=np.arange(80), max_tokens=3)
    workers = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(*workers) as streams:
        for worker in workers:  # the other one would be chosen if neither had told
            names = block_hashes(asked.prompt)
            worker.say_blocks(pb.Blocks(added=names))
            await until(lambda: len(streams._router._residents) == 1)
            generation = streams.submit(asked)
            assert list((await worker.heard()).submit.prompt) == asked.prompt.tolist()
            worker.say(
                Update(1, 0, (5,), num_cached_tokens=64, finish_reason=FinishReason.STOP),
                request_id=generation.request_id,
            )
            await generation.next()
            worker.say_blocks(pb.Blocks(removed=names))
            await until(lambda: len(streams._router._residents) == 0)
        predictions = streams.predictions
        assert predictions.num_predicted_tokens == predictions.num_cached_tokens == 128
