"""Sequences outlive their workers: scripted workers over real gRPC are lost, and others go on with what they ran."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from cluster.routing.failover import FailoverLimits
from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Member
from cluster.routing.streams import Streams
from planner.errors import (
    DeadlineExceeded,
    ForwardFailed,
    NeverFits,
    QueueFull,
    RequestRefused,
    Unavailable,
    WorkerLost,
)
from planner.request import FinishReason, Request, SamplingParams, TokenLogprobs, Update, sequence_seed
from protos import worker_pb2 as pb
from tests.scripted_worker import ScriptedWorker, fleet_of, request, tokens, until

PATIENCE_S = 10.0
STOP = FinishReason.STOP


class Reader:
    """What the task of one request has read: everything by index, and each end once."""

    def __init__(self, generation: RemoteGeneration) -> None:
        self.generation = generation
        self.tokens: dict[int, tuple[int, ...]] = defaultdict(tuple)
        self.logprobs: dict[int, tuple[TokenLogprobs, ...]] = defaultdict(tuple)
        self.scores: list[int] = []
        self.ends: dict[int, Update] = {}
        self.num_cached: set[int] = set()

    async def read_to(self, *num_tokens: int) -> None:
        """Until each index has so many tokens."""
        while any(len(self.tokens[index]) < num for index, num in enumerate(num_tokens)):
            await self.read()

    async def read_ends(self, num: int = 1) -> None:
        while len(self.ends) < num:
            await self.read()

    async def read(self) -> None:
        for update in await asyncio.wait_for(self.generation.next(), PATIENCE_S):
            assert update.index not in self.ends, "news after the end"
            assert update.request_id == self.generation.request_id
            self.tokens[update.index] += update.tokens
            self.logprobs[update.index] += update.logprobs
            self.scores += [score.token for score in update.prompt_logprobs]
            self.num_cached.add(update.num_cached_tokens)
            if update.finish_reason is not None:
                self.ends[update.index] = update


async def begun(streams: Streams, worker: ScriptedWorker, asked: Request, *first: Update) -> Reader:
    """A request that `worker` has answered so far with `first`, all of it read."""
    reader = Reader(streams.submit(asked))
    submit = (await worker.heard()).submit
    if first:
        worker.say(*first, request_id=submit.request_id)
        await reader.read()
    return reader


async def add(streams: Streams, *workers: ScriptedWorker) -> None:
    """Make these the members, of which the running ones stay as they are."""
    members = {}
    for worker in workers:
        running = worker.attached > 0
        members[worker.worker_id] = Member(worker.worker_id, f"127.0.0.1:{worker.port}")
        if not running:
            members[worker.worker_id] = await worker.start()
    streams.set_members(members)


async def submitted(worker: ScriptedWorker) -> pb.Submit:
    command = await worker.heard()
    assert command.WhichOneof("command") == "submit"
    return command.submit


async def test_each_sequence_goes_on_where_it_stood() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        sampling = SamplingParams(seed=11, presence_penalty=1.0)
        asked = Request(np.array([1, 2, 3], np.int64), 9, sampling, min_tokens=2, n=3, priority=4)
        reader = await begun(streams, lost, asked, tokens(5), tokens(6, 7, 8, index=1))
        await lost.stop()
        submits = [await submitted(other) for _ in range(3)]
        assert [list(submit.prompt) for submit in submits] == [[1, 2, 3, 5], [1, 2, 3, 6, 7, 8], [1, 2, 3]]
        assert [(s.max_tokens, s.min_tokens, s.num_generated) for s in submits] == [(8, 1, 1), (6, 0, 3), (9, 2, 0)]
        assert [submit.sampling.seed for submit in submits] == [sequence_seed(11, index) for index in range(3)]
        assert all((s.n, s.priority, s.sampling.presence_penalty) == (1, 4, 1.0) for s in submits)
        for token, submit in zip([20, 21, 22], submits, strict=True):
            other.say(tokens(token, finish=STOP), request_id=submit.request_id)
        await reader.read_ends(3)
        assert dict(reader.tokens) == {0: (5, 20), 1: (6, 7, 8, 21), 2: (22,)}
        assert streams.num_live == 0


async def test_a_request_without_a_token_yet_is_sent_again_as_it_was() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        asked = request(n=3)
        reader = Reader(streams.submit(asked))
        first = await submitted(lost)
        await lost.stop()
        again = await submitted(other)
        assert (again.n, again.num_generated, again.sampling) == (3, 0, first.sampling)
        other.say(*(tokens(7, index=index, finish=STOP) for index in range(3)), request_id=again.request_id)
        await reader.read_ends(3)


async def test_what_was_cancelled_before_the_first_token_stays_cancelled() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        reader = await begun(streams, lost, request(n=3))
        reader.generation.cancel([1])
        await lost.stop()
        assert (await submitted(other)).n == 3
        assert list((await other.heard()).cancel.indices) == [1]


async def test_a_sequence_may_lose_several_workers() -> None:
    workers = [ScriptedWorker(name) for name in "abc"]
    async with fleet_of(*workers) as streams:
        reader = await begun(streams, workers[0], request(), tokens(5))
        await workers[0].stop()
        submit = await submitted(workers[1])
        workers[1].say(tokens(6), request_id=submit.request_id)
        await reader.read_to(2)
        await workers[1].stop()
        submit = await submitted(workers[2])
        assert (list(submit.prompt), submit.num_generated, submit.max_tokens) == ([1, 2, 3, 5, 6], 2, 7)
        workers[2].say(tokens(7, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert reader.tokens[0] == (5, 6, 7)


async def test_a_sequence_that_keeps_losing_workers_fails() -> None:
    workers = [ScriptedWorker(name) for name in "abc"]
    async with fleet_of(*workers, limits=FailoverLimits(max_failovers=1)) as streams:
        reader = await begun(streams, workers[0], request(), tokens(5))
        await workers[0].stop()
        await submitted(workers[1])
        await workers[1].stop()
        await reader.read_ends()
        error = reader.ends[0].error
        assert isinstance(error, WorkerLost)
        assert "had lost 1" in error.message
        assert reader.tokens[0] == (5,)
        assert workers[2].commands.empty()
        assert streams.num_live == 0


async def test_sequences_wait_for_a_worker_when_there_is_none() -> None:
    lost, late = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost) as streams:
        reader = await begun(streams, lost, request(), tokens(5))
        await lost.stop()
        await until(lambda: not streams.ready)
        with pytest.raises(Unavailable):
            streams.submit(request())
        assert streams.num_live == 1
        await add(streams, late)
        submit = await submitted(late)
        late.say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert reader.tokens[0] == (5, 6)
        await streams.close()
        await late.stop()


async def test_a_wait_for_a_worker_ends_with_a_typed_error() -> None:
    lost = ScriptedWorker("a")
    async with fleet_of(lost, limits=FailoverLimits(timeout_s=0.2)) as streams:
        reader = await begun(streams, lost, request(n=2), tokens(5))
        await lost.stop()
        await reader.read_ends(2)
        assert all(end.finish_reason is FinishReason.FAILED for end in reader.ends.values())
        assert isinstance(reader.ends[0].error, WorkerLost)
        assert "within 0.2 s" in reader.ends[0].error.message
        assert streams.num_live == 0


@pytest.mark.parametrize("begun_there", [False, True])
async def test_a_deadline_ends_the_wait_for_a_worker(*, begun_there: bool) -> None:
    lost = ScriptedWorker("a")
    async with fleet_of(lost) as streams:
        asked = replace(request(n=2), deadline=time.monotonic() + 0.3)
        reader = await begun(streams, lost, asked, *([tokens(5)] if begun_there else []))
        await lost.stop()
        await reader.read_ends(2)
        assert time.monotonic() >= (asked.deadline or 0)
        assert all(isinstance(end.error, DeadlineExceeded) for end in reader.ends.values())
        assert streams.num_live == 0


async def test_a_stream_that_opens_again_goes_on_with_what_it_lost() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        reader = await begun(streams, worker, request(), tokens(5))
        worker.hang_up()
        submit = await submitted(worker)
        assert list(submit.prompt) == [1, 2, 3, 5]
        worker.say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()


async def test_a_cancel_between_workers_is_final_and_sends_nothing() -> None:
    lost, late = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost) as streams:
        gone = await begun(streams, lost, request(), tokens(5))
        half = await begun(streams, lost, request(n=2), tokens(5), tokens(6, index=1))
        await lost.stop()
        await until(lambda: not streams.ready)
        gone.generation.cancel()
        half.generation.cancel([0])
        assert await gone.generation.next() == []
        assert streams.num_live == 1
        await add(streams, late)
        assert list((await submitted(late)).prompt) == [1, 2, 3, 6]
        await asyncio.sleep(0.2)
        assert late.commands.empty()
        await streams.close()
        await late.stop()


async def test_a_continuation_is_cancelled_like_any_request() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        reader = await begun(streams, lost, request(n=2), tokens(5), tokens(6, index=1))
        await lost.stop()
        ids = [(await submitted(other)).request_id for _ in range(2)]
        reader.generation.cancel([1])
        assert (await other.heard()).cancel == pb.Cancel(request_id=ids[1])
        reader.generation.cancel()
        assert (await other.heard()).cancel == pb.Cancel(request_id=ids[0])
        assert streams.num_live == 0


async def test_a_generation_that_nobody_holds_is_cancelled_wherever_it_is() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        reader = await begun(streams, lost, request(), tokens(5))
        await lost.stop()
        submit = await submitted(other)
        del reader
        gc.collect()
        assert (await other.heard()).cancel.request_id == submit.request_id
        reader = await begun(streams, other, request(), tokens(5, index=0))
        await other.stop()
        await until(lambda: not streams.ready)
        assert streams.num_live == 1
        del reader
        gc.collect()
        assert streams.num_live == 0


async def test_a_refused_continuation_is_offered_to_the_others_and_then_again() -> None:
    workers = [ScriptedWorker(name) for name in "abc"]
    async with fleet_of(*workers) as streams:
        reader = await begun(streams, workers[0], request(), tokens(5))
        await workers[0].stop()
        for worker in (workers[1], workers[2], workers[1], workers[2]):
            submit = await submitted(worker)
            assert list(submit.prompt) == [1, 2, 3, 5]
            if worker is workers[1]:
                worker.say(QueueFull("full"), request_id=submit.request_id)
            else:
                worker.say(NeverFits("too small"), request_id=submit.request_id)
        submit = await submitted(workers[1])
        workers[1].say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert reader.tokens[0] == (5, 6)


async def test_refusals_do_not_prolong_the_wait() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other, limits=FailoverLimits(timeout_s=0.3)) as streams:
        reader = await begun(streams, lost, request(), tokens(5))
        await lost.stop()

        async def refuse_all() -> None:
            while True:
                submit = await submitted(other)
                other.say(QueueFull("no room today"), request_id=submit.request_id)

        refusing = asyncio.create_task(refuse_all())
        await reader.read_ends()
        refusing.cancel()
        error = reader.ends[0].error
        assert isinstance(error, WorkerLost)
        assert "no room today" in error.message


async def test_a_new_request_moves_on_from_a_worker_that_is_about_to_end() -> None:
    ending, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(ending, other) as streams:
        reader = Reader(streams.submit(request()))
        ending.say(Unavailable("draining"), request_id=(await submitted(ending)).request_id)
        submit = await submitted(other)
        other.say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert streams.num_live == 0


@pytest.mark.parametrize("refusal", [QueueFull("full"), NeverFits("too small")], ids=["full", "too small"])
async def test_a_new_request_that_a_worker_refuses_for_its_own_sake_is_refused_at_once(refusal: RequestRefused) -> None:
    workers = [ScriptedWorker("a"), ScriptedWorker("b")]
    async with fleet_of(*workers) as streams:
        generation = streams.submit(request())
        workers[0].say(refusal, request_id=(await submitted(workers[0])).request_id)
        with pytest.raises(type(refusal)):
            await generation.next()
        assert streams.num_live == 0
        assert workers[1].commands.empty()


async def test_a_new_request_that_every_worker_refuses_since_it_is_about_to_end_goes_to_the_one_that_follows() -> None:
    """None of them had said before that it drains."""
    workers, follows = [ScriptedWorker("a"), ScriptedWorker("b")], ScriptedWorker("c")
    async with fleet_of(*workers) as streams:
        reader = Reader(streams.submit(request()))
        for worker in workers:
            worker.say(Unavailable("draining"), request_id=(await submitted(worker)).request_id)
        await until(lambda: streams._failover.num_waiting == 1)
        streams.set_members({"c": await follows.start()})
        submit = await submitted(follows)
        follows.say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert streams.num_live == 0
        await streams.close()
        await follows.stop()


async def test_what_a_worker_gives_up_goes_on_elsewhere() -> None:
    """A worker whose time to drain is over cancels what it runs; one whose engine died fails it."""
    ending, other = ScriptedWorker("a"), ScriptedWorker("b")
    draining = pb.Snapshot(capacity=1000, free_cells=1000, step=1, draining=True)
    async with fleet_of(ending, other) as streams:
        reader = await begun(streams, ending, request(n=2), tokens(5))
        died = Update(1, 0, finish_reason=FinishReason.FAILED, error=WorkerLost("the engine died"))
        ending.say(died, tokens(6, index=1, finish=FinishReason.CANCELLED), snapshot=draining)
        submits = [await submitted(other) for _ in range(2)]
        assert [list(submit.prompt) for submit in submits] == [[1, 2, 3, 5], [1, 2, 3, 6]]
        for submit in submits:
            other.say(tokens(9, finish=STOP), request_id=submit.request_id)
        await reader.read_ends(2)
        assert dict(reader.tokens) == {0: (5, 9), 1: (6, 9)}


async def test_a_failure_of_the_sequence_itself_is_its_end() -> None:
    worker, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(worker, other) as streams:
        reader = await begun(streams, worker, request(), tokens(5))
        worker.say(Update(1, 0, finish_reason=FinishReason.FAILED, error=ForwardFailed("bad")))
        await reader.read_ends()
        assert isinstance(reader.ends[0].error, ForwardFailed)
        assert other.commands.empty()


async def test_the_cached_part_of_a_prompt_is_told_as_the_first_worker_told_it() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        reader = await begun(streams, lost, request(n=2), Update(1, 0, tokens=(5,), num_cached_tokens=2))
        await lost.stop()
        for _ in range(2):
            submit = await submitted(other)
            last = Update(1, 0, tokens=(6,), num_cached_tokens=3, finish_reason=STOP)
            other.say(last, request_id=submit.request_id)
        await reader.read_ends(2)
        assert reader.num_cached == {2}


async def test_a_worker_that_never_began_says_nothing_of_the_cached_part() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(lost, other) as streams:
        reader = await begun(streams, lost, request())
        lost.say(Update(1, 0, finish_reason=FinishReason.FAILED, error=WorkerLost("the engine died")))
        await submitted(lost)  # nothing else is known against it
        await lost.stop()
        submit = await submitted(other)
        other.say(Update(1, 0, tokens=(6,), num_cached_tokens=3, finish_reason=STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert reader.num_cached == {3}


async def test_log_probabilities_go_on_with_their_tokens() -> None:
    lost, other = ScriptedWorker("a"), ScriptedWorker("b")

    def scored(token: int, finish: FinishReason | None = None) -> Update:
        return Update(1, 0, (token,), (TokenLogprobs(token, -0.5),), finish_reason=finish)

    async with fleet_of(lost, other) as streams:
        asked = Request(np.array([1, 2, 3], np.int64), 9, SamplingParams(logprobs=2))
        reader = await begun(streams, lost, asked, scored(5))
        await lost.stop()
        submit = await submitted(other)
        assert submit.sampling.logprobs == 2
        other.say(scored(6), scored(7, STOP), request_id=submit.request_id)
        await reader.read_ends()
        assert [scores.token for scores in reader.logprobs[0]] == list(reader.tokens[0]) == [5, 6, 7]


async def test_log_probabilities_of_the_prompt_come_once() -> None:
    workers = [ScriptedWorker(name) for name in "abc"]

    def scores(*ids: int, tokens: tuple[int, ...] = ()) -> Update:
        return Update(1, 0, tokens, prompt_logprobs=tuple(TokenLogprobs(token, None) for token in ids))

    async with fleet_of(*workers) as streams:
        asked = Request(np.array([1, 2, 3], np.int64), 9, prompt_logprobs=True)
        reader = await begun(streams, workers[0], asked, scores(1, 2))
        await workers[0].stop()
        submit = await submitted(workers[1])
        assert submit.prompt_logprobs
        workers[1].say(scores(1), request_id=submit.request_id)
        workers[1].say(scores(2, 3, tokens=(5,)), request_id=submit.request_id)
        await reader.read_to(1)
        assert reader.scores == [1, 2, 3]
        await workers[1].stop()
        assert not (await submitted(workers[2])).prompt_logprobs


async def test_a_worker_that_hangs_is_lost_and_gets_nothing_before_it_speaks_again() -> None:
    hung, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(hung, other, limits=FailoverLimits(stall_timeout_s=0.4)) as streams:
        reader = await begun(streams, hung, request(), tokens(5))
        submit = await submitted(other)
        other.say(tokens(6, finish=STOP), request_id=submit.request_id)
        await reader.read_ends()
        await until(lambda: hung.num_streams == 2)  # its server greets again; its engine says nothing
        more = [streams.submit(request()) for _ in range(3)]
        for _ in more:
            await submitted(other)
        assert hung.commands.empty()
        hung.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=1))
        await until(lambda: len(streams._router.infos) == 2)


async def test_a_slow_worker_that_shows_life_is_not_lost() -> None:
    slow, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(slow, other, limits=FailoverLimits(stall_timeout_s=1.0)) as streams:
        await asyncio.sleep(1.1)  # it is silent while it has nothing to do
        reader = await begun(streams, slow, request())
        for step in range(8):
            await asyncio.sleep(0.15)
            slow.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=step))
        slow.say(tokens(5, finish=STOP))
        await reader.read_ends()
        assert other.commands.empty()


async def test_a_gateway_that_was_stopped_for_a_while_takes_no_worker_for_lost() -> None:
    worker, other = ScriptedWorker("a"), ScriptedWorker("b")
    async with fleet_of(worker, other, limits=FailoverLimits(stall_timeout_s=0.4)) as streams:
        reader = await begun(streams, worker, request(), tokens(5))
        time.sleep(0.6)  # noqa: ASYNC251 - as a process that the system stops
        worker.say(tokens(6, finish=STOP))
        await reader.read_ends()
        assert (reader.tokens[0], worker.num_streams) == ((5, 6), 1)
        assert other.commands.empty()


async def test_closing_ends_what_waits_for_a_worker() -> None:
    lost = ScriptedWorker("a")
    async with fleet_of(lost) as streams:
        reader = await begun(streams, lost, request(), tokens(5))
        await lost.stop()
        await until(lambda: not streams.ready)
        await streams.close()
        await reader.read_ends()
        assert isinstance(reader.ends[0].error, WorkerLost)
        assert "shutting down" in reader.ends[0].error.message
        assert streams.num_live == 0
