"""What waits for a gateway is bounded and merged."""

from __future__ import annotations

import asyncio

from planner.blocks import BlockChanges
from planner.errors import Unavailable
from planner.limits import Snapshot
from planner.request import FinishReason, TokenLogprobs, Update
from tests.data_plane import PATIENCE_S
from worker.client import StepReport
from worker.outbox import MAX_BLOCKS_IN_MESSAGE, MAX_UNREAD_ENDS, MAX_UNREAD_MESSAGES, Outbox, merged

SNAPSHOT = Snapshot(10, 10, 0, 0, 0, 0, 0, 0)


def test_merged_updates_are_the_two_in_order() -> None:
    before = Update(1, 0, (5, 6), (TokenLogprobs(5, -1.0),), (TokenLogprobs(1, None),), num_cached_tokens=3)
    after = Update(1, 0, (7,), (TokenLogprobs(7, -2.0),), (TokenLogprobs(2, -1.0),), 0, FinishReason.STOP)
    both = merged(before, after)
    assert both.tokens == (5, 6, 7)
    assert [entry.token for entry in both.logprobs] == [5, 7]
    assert [entry.token for entry in both.prompt_logprobs] == [1, 2]
    assert both.num_cached_tokens == 3
    assert both.finish_reason is FinishReason.STOP


async def test_what_waits_in_an_outbox_is_bounded_by_sequences_not_by_steps() -> None:
    outbox = Outbox()
    outbox.open(1, 1)
    for step in range(500):
        outbox.add(StepReport(((1, Update(9, 0, (step,))),), SNAPSHOT), draining=False)
    message = await outbox.next()
    assert message is not None
    assert len(message.updates) == 1
    assert list(message.updates[0].tokens) == list(range(500))
    outbox.finish()
    ending = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not ending.done()
    outbox.note_read(1)
    assert await ending is None


async def test_an_outbox_is_idle_when_the_last_end_was_sent() -> None:
    outbox = Outbox()
    idle = [outbox.is_idle]
    outbox.open(1, 2)
    for index in range(2):
        end = Update(9, index, finish_reason=FinishReason.STOP)
        outbox.add(StepReport(((1, end),), SNAPSHOT), draining=False)
        assert await outbox.next() is not None
        idle.append(outbox.is_idle)
        outbox.note_sent()
        idle.append(outbox.is_idle)
    assert idle == [True, False, False, False, True]


async def test_a_gateway_that_does_not_read_its_refusals_is_not_read_from() -> None:
    outbox = Outbox()
    for key in range(MAX_UNREAD_ENDS + 1):
        outbox.refuse(key, Unavailable("no"))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    message = await outbox.next()
    assert message is not None
    assert len(message.updates) == MAX_UNREAD_ENDS + 1
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_nothing_is_sent_while_enough_messages_are_unread_and_the_news_merge() -> None:
    outbox = Outbox()
    outbox.open(1, 1)

    def add(token: int) -> None:
        outbox.add(StepReport(((1, Update(9, 0, (token,))),), SNAPSHOT), draining=False)

    for token in range(MAX_UNREAD_MESSAGES):
        add(token)
        assert await outbox.next() is not None
    sending = asyncio.create_task(outbox.next())
    for token in (7, 8, 9):
        add(token)
        await asyncio.sleep(0)
    assert not sending.done()
    outbox.note_read(1)
    message = await asyncio.wait_for(sending, PATIENCE_S)
    assert message is not None
    assert list(message.updates[0].tokens) == [7, 8, 9]


async def test_unread_messages_hold_up_neither_the_end_nor_commands_that_wait_for_room() -> None:
    ending, crowded = Outbox(), Outbox()
    for outbox in (ending, crowded):
        for _ in range(MAX_UNREAD_MESSAGES):
            outbox.refuse(1, Unavailable("no"))
            assert await outbox.next() is not None
    ending.hang_up()
    assert await asyncio.wait_for(ending.next(), PATIENCE_S) is None
    for key in range(MAX_UNREAD_ENDS + 1):
        crowded.refuse(key, Unavailable("no"))
    assert await asyncio.wait_for(crowded.next(), PATIENCE_S) is not None
    await asyncio.wait_for(crowded.wait_for_room(), PATIENCE_S)


async def test_names_of_prefixes_go_out_in_pieces_and_merge_while_the_gateway_lags() -> None:
    outbox = Outbox()
    everything = tuple(range(1, MAX_BLOCKS_IN_MESSAGE + 3))
    outbox.add(StepReport((), SNAPSHOT, BlockChanges(added=everything)), draining=False)
    outbox.add(StepReport((), SNAPSHOT, BlockChanges(removed=(1,))), draining=False)
    first, second = await outbox.next(), await asyncio.wait_for(outbox.next(), PATIENCE_S)
    assert first is not None
    assert second is not None
    assert [*first.blocks.added, *second.blocks.added] == list(everything[1:])
    assert not first.blocks.removed
    assert not second.blocks.removed
    assert not second.HasField("snapshot")
    outbox.note_read(2)
    outbox.add(StepReport((), SNAPSHOT, BlockChanges(added=(1,), removed=(2,))), draining=False)
    outbox.add(StepReport((), SNAPSHOT), draining=False)
    third = await outbox.next()
    assert third is not None
    assert (list(third.blocks.added), list(third.blocks.removed)) == ([1], [2])
    outbox.note_read(3)
    outbox.add(StepReport((), SNAPSHOT), draining=False)
    fourth = await outbox.next()
    assert fourth is not None
    assert not fourth.HasField("blocks")


async def test_names_of_prefixes_that_wait_do_not_hold_up_a_drain() -> None:
    outbox = Outbox()
    outbox.add(StepReport((), SNAPSHOT, BlockChanges(added=tuple(range(2 * MAX_BLOCKS_IN_MESSAGE)))), draining=True)
    assert outbox.is_idle
    assert await outbox.next() is not None
    outbox.hang_up()
    assert await asyncio.wait_for(outbox.next(), PATIENCE_S) is None


async def test_a_state_says_which_request_was_the_last_that_it_counts() -> None:
    outbox = Outbox()
    told = []
    for request_id in (3, 8):
        outbox.tell(SNAPSHOT, draining=False)
        outbox.note_new(request_id)  # it came behind
        message = await outbox.next()
        assert message is not None
        outbox.note_sent()
        told.append(message.snapshot.newest_request)
    assert told == [0, 3]


async def test_what_the_engine_has_no_part_in_is_no_sign_that_it_gets_on() -> None:
    outbox = Outbox()
    outbox.open(1, 1)

    async def told() -> bool:
        message = await outbox.next()
        assert message is not None
        outbox.note_sent()
        outbox.note_read(outbox._num_sent)
        return message.beside_engine

    outbox.tell(SNAPSHOT, draining=False)
    assert await told()
    outbox.refuse(2, Unavailable("the inbox is full"))
    assert await told()
    outbox.beat()
    assert not await told(), "nothing but words of others since the last beat"
    outbox.tell(SNAPSHOT, draining=False)
    outbox.add(StepReport((), SNAPSHOT), draining=False)
    assert not await told()
    outbox.beat()
    outbox.tell(SNAPSHOT, draining=False)
    assert await told(), "the engine has spoken since, so no beat is due"
