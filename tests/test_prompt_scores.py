"""Log probabilities of a long prompt come from a worker without holding up the gateway's event loop."""

from __future__ import annotations

import asyncio

import pytest

from cluster.routing.prompt_scores import AT_ONCE, long_prompt_scores
from planner.request import FinishReason, TokenLogprobs, Update
from protos import worker_pb2 as pb
from tests.fake_fleet import score
from tests.scripted_worker import ScriptedWorker, fleet_of, request
from worker.wire import write_update


def scores(count: int) -> tuple[TokenLogprobs, ...]:
    """As they come over the wire; the first of a prompt has no log probability."""
    return (TokenLogprobs(3, None), *(score(10 + i % 90, 2) for i in range(count - 1)))


def message_of(update: Update) -> pb.SequenceUpdate:
    message = pb.SequenceUpdate()
    write_update(message, update.request_id, update)
    return message


@pytest.mark.parametrize("count", [AT_ONCE + 1, 4 * AT_ONCE, 4 * AT_ONCE + 1])
async def test_the_loop_turns_while_many_are_read(count: int) -> None:
    updates = [Update(1, 0, (7,)), Update(2, 0, prompt_logprobs=scores(count))]
    messages = [message_of(update) for update in updates]
    reading = asyncio.create_task(long_prompt_scores(messages))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert reading.result() == {1: scores(count)}
    assert num_turns >= count // AT_ONCE


async def test_few_are_left_to_be_read_with_their_update() -> None:
    message = message_of(Update(1, 0, prompt_logprobs=scores(AT_ONCE)))
    assert await long_prompt_scores([message]) == {}


async def test_many_reach_the_generation_that_they_are_for_and_nothing_overtakes_them() -> None:
    worker, told = ScriptedWorker(), scores(3 * AT_ONCE)
    async with fleet_of(worker) as streams:
        first, second = streams.submit(request()), streams.submit(request())
        ids = [(await worker.heard()).submit.request_id for _ in range(2)]
        worker.say(Update(1, 0, prompt_logprobs=told[:5]), request_id=ids[0])
        worker.say(Update(1, 0, (8,), finish_reason=FinishReason.STOP, prompt_logprobs=told), request_id=ids[1])
        worker.say(Update(1, 0, (9,), finish_reason=FinishReason.STOP, prompt_logprobs=told[5:]), request_id=ids[0])
        (ended,) = await second.next()
        assert (ended.tokens, ended.prompt_logprobs) == ((8,), told)
        mine: list[TokenLogprobs] = []
        tokens: list[int] = []
        while not tokens:
            for update in await first.next():
                mine += update.prompt_logprobs
                tokens += update.tokens
        assert (tuple(mine), tokens) == (told, [9])
