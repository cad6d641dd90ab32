"""Sequences with an adapter go on at workers that have it, over the real data plane, and wait where none has it yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from planner.errors import Unavailable
from planner.request import Adapter, Request, SamplingParams
from tests.company import Company, EngineWorker
from tests.fake_slots import save_fake_adapter
from tests.fakes import expected_tokens, fake_request
from tests.scripted_worker import until

PIRATE = Adapter("pirate", 2**63 + 7)
LONG = 80


@pytest.fixture
async def company() -> AsyncIterator[Company]:
    made = Company(num_workers=3, max_failovers=3, num_slots=1)
    await made.start()
    yield made
    await made.close()


async def equip(company: Company, folder: Path, *workers: EngineWorker) -> None:
    """Have workers load the adapter, and the gateway hear of it."""
    saved = save_fake_adapter(folder / "pirate", PIRATE.revision)
    for worker in workers:
        await asyncio.wrap_future(worker.engine.load_adapter("pirate", saved))
    without = len(company.workers) - len([each for each in company.workers if each.engine.adapters])
    await until(lambda: company.streams.num_without("pirate") == without)


async def answered(company: Company, request: Request) -> tuple[int, ...]:
    generation = company.streams.submit(request)
    tokens: tuple[int, ...] = ()
    while True:
        async with asyncio.timeout(30):
            updates = await generation.next()
        for update in updates:
            assert update.error is None, update.error
            tokens += update.tokens
            if update.finish_reason is not None:
                return tokens


def requests(adapter: Adapter | None, number: int) -> list[Request]:
    sampling = SamplingParams(seed=number)
    return [fake_request([number, place, 3], LONG, sampling=sampling, adapter=adapter) for place in range(number)]


async def test_a_lost_workers_sequences_go_on_only_where_their_adapter_is(company: Company, tmp_path: Path) -> None:
    first, second, third = company.workers
    await equip(company, tmp_path, first, second)
    asked = [*requests(PIRATE, 6), *requests(None, 6)]
    answers = [asyncio.create_task(answered(company, request)) for request in asked]
    await until(lambda: first.engine.num_live > 0 and second.engine.num_live > 0 and third.engine.num_live > 0)
    await asyncio.sleep(0.05)
    await company.replace(first, killed=True)
    assert await asyncio.gather(*answers) == [expected_tokens(request) for request in asked]
    assert third.engine.adapters == ()


async def test_they_wait_for_a_worker_that_loads_it(company: Company, tmp_path: Path) -> None:
    first, second, _ = company.workers
    await equip(company, tmp_path, first)
    (asked,) = requests(PIRATE, 1)
    answer = asyncio.create_task(answered(company, asked))
    await until(lambda: first.engine.num_live > 0)
    await asyncio.sleep(0.05)
    await company.replace(first, killed=True)
    await asyncio.sleep(0.2)
    assert not answer.done()
    assert sum(worker.engine.num_live for worker in company.workers) == 0
    await equip(company, tmp_path, second)
    assert await answer == expected_tokens(asked)


async def test_who_waits_for_an_adapter_keeps_nobody_else_waiting(company: Company, tmp_path: Path) -> None:
    first, second, _ = company.workers
    await equip(company, tmp_path, first)
    (special,) = requests(PIRATE, 1)
    special_answer = asyncio.create_task(answered(company, special))
    await until(lambda: first.engine.num_live == 1)
    plain = requests(None, 12)
    answers = [asyncio.create_task(answered(company, request)) for request in plain]
    await until(lambda: first.engine.num_live > 1)
    await company.replace(first, killed=True)
    assert await asyncio.gather(*answers) == [expected_tokens(request) for request in plain]
    assert not special_answer.done()
    await equip(company, tmp_path, second)
    assert await special_answer == expected_tokens(special)


async def test_a_new_request_is_not_kept_waiting_for_an_adapter_that_nobody_has(company: Company) -> None:
    with pytest.raises(Unavailable, match="no worker has the adapter 'pirate' now"):
        company.streams.submit(requests(PIRATE, 1)[0])


async def test_a_worker_that_comes_is_known_with_its_adapters_at_once(company: Company, tmp_path: Path) -> None:
    """Else a request could be told, in the first moment, that there is no such model."""
    first = company.workers[0]
    await equip(company, tmp_path, *company.workers)
    streams = company.streams
    streams.set_members({})
    await until(lambda: not streams._router.infos)
    streams.set_members({first.worker_id: company._members[first.worker_id]})
    await until(lambda: bool(streams._router.infos))
    assert streams.adapters == {"pirate": PIRATE}
