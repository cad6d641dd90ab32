"""Failover with real engines behind the data plane: whatever dies, every answer is that of the undisturbed run.

The executor is the fake, whose tokens depend on seed, position and all tokens before; a wrong continuation would show.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time

import pytest

from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from planner.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.company import STEP_TIME_S, Company, EngineWorker
from tests.data_plane import SECRET, attached, holding, serving
from tests.fakes import FakeExecutor, expected_tokens, fake_request
from tests.scripted_worker import until
from tests.service_process import ROOT

NUM_KILLS = 8
NUM_REQUESTS = 40


def random_request(chance: random.Random) -> Request:
    max_tokens = chance.randrange(1, 60)
    return fake_request(
        [chance.randrange(100) for _ in range(chance.randrange(1, 40))],
        max_tokens,
        sampling=SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(2**64),
            presence_penalty=chance.choice([0.0, 0.5]),
            logprobs=chance.choice([None, 2]),
        ),
        n=chance.randrange(1, 4),
        min_tokens=min(max_tokens, chance.choice([0, 20])),
        stop_token_ids=frozenset(chance.sample(range(1000), 20)),
        prompt_logprobs=chance.random() < 0.3,
    )


async def check_answer(streams: Streams, request: Request) -> int:
    """Read a request to its end; everything of it must be as if nothing had happened. The number of its tokens."""
    generation = streams.submit(request)
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(range(request.n), ())
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = dict.fromkeys(range(request.n), ())
    scores: list[int] = []
    ends: dict[int, FinishReason] = {}
    while len(ends) < request.n:
        for update in await asyncio.wait_for(generation.next(), 30):
            assert update.index not in ends
            tokens[update.index] += update.tokens
            logprobs[update.index] += update.logprobs
            scores += [score.token for score in update.prompt_logprobs]
            if update.finish_reason is not None:
                ends[update.index] = update.finish_reason
    for index in range(request.n):
        assert tokens[index] == expected_tokens(request, index)
        stopped = tokens[index][-1] in request.stop_token_ids and len(tokens[index]) > request.min_tokens
        assert ends[index] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        scored = [] if request.sampling.logprobs is None else list(tokens[index])
        assert [score.token for score in logprobs[index]] == scored
    assert scores == (request.prompt.tolist() if request.prompt_logprobs else [])
    return sum(map(len, tokens.values()))


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_answer_is_whole_and_right_while_workers_die(seed: int) -> None:
    chance = random.Random(seed)
    company = Company(3, max_failovers=NUM_KILLS)
    await company.start()
    asked = [random_request(chance) for _ in range(NUM_REQUESTS)]
    answers = asyncio.gather(*(check_answer(company.streams, request) for request in asked))
    try:
        for _ in range(NUM_KILLS):
            await asyncio.sleep(chance.uniform(0.0, 0.06))
            await company.replace(chance.choice(company.workers), killed=chance.random() < 0.7)
        await answers
        assert company.streams.num_live == 0
        assert company.streams._next_request_id > NUM_REQUESTS + NUM_KILLS, "hardly anything was lost"
        for worker in company.workers:
            await until(lambda engine=worker.engine: engine.num_live == 0)  # type: ignore[misc]
            snapshot = worker.engine.snapshot
            assert (snapshot.num_running, snapshot.num_waiting, snapshot.owned_cells) == (0, 0, 0)
    finally:
        await company.close()


async def test_a_worker_whose_executor_hangs_is_given_up_for_another() -> None:
    limits = FailoverLimits(stall_timeout_s=0.5)
    streams = Streams("served", SECRET, Router(max_waiting=100), limits)
    async with serving(holding()) as hung:
        other = EngineWorker("worker-2")
        try:
            streams.set_members({"worker-1": Member("worker-1", hung.address), "worker-2": await other.start()})
            await until(lambda: len(streams._router.infos) == 2)
            asked = [fake_request([key, 2, 3], 20, n=2) for key in range(4)]
            answers = asyncio.gather(*(check_answer(streams, request) for request in asked))
            assert await answers == [40] * 4
            assert len(hung.executor.steps) == 1  # it had begun
        finally:
            await streams.close()
            await other.die()


async def test_requests_of_others_do_not_make_a_hung_engine_look_alive() -> None:
    """Its server tells every gateway of each of them."""
    streams = Streams("served", SECRET, Router(max_waiting=100), FailoverLimits(stall_timeout_s=0.5))
    async with serving(holding()) as hung, attached(hung.address) as others:
        second = EngineWorker("worker-2")
        try:
            streams.set_members({"worker-1": Member("worker-1", hung.address)})
            await until(lambda: len(streams._router.infos) == 1)
            waiting = asyncio.create_task(check_answer(streams, fake_request([1, 2, 3], 20)))
            await asyncio.to_thread(hung.executor.wait_launched, 1)
            streams.set_members({"worker-1": Member("worker-1", hung.address), "worker-2": await second.start()})
            for number in range(100):
                if waiting.done():
                    break
                await others.submit(number, fake_request())
                await asyncio.sleep(0.05)
            assert waiting.done(), "five seconds of silence"
            assert await waiting == 20
        finally:
            await streams.close()
            await second.die()


async def test_what_a_killed_gateway_had_asked_for_is_cancelled_within_a_second() -> None:
    async with serving(FakeExecutor(step_time_s=STEP_TIME_S)) as worker:
        command = ["-m", "tests.doomed_gateway", worker.address, SECRET, "6"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
        )
        assert gateway.stdout is not None
        assert await asyncio.wait_for(gateway.stdout.readline(), 60) == b"all run\n"
        assert worker.engine.snapshot.num_running == 12
        gateway.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await until(lambda: worker.engine.num_live == 0 and worker.engine.snapshot.owned_cells == 0)
        assert time.monotonic() - killed_at < 1.0
        await gateway.wait()
