"""A fleet of real engines with fake executors behind the real data plane, whose workers come and go."""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from tests.data_plane import SECRET
from tests.fakes import FakeExecutor, fake_limits
from tests.scripted_worker import until
from worker.engine import Engine
from worker.executor import ProgramInfo
from worker.serving import DataPlaneServer

STEP_TIME_S: Final = 0.003


class EngineWorker:
    """A worker of the fleet: an engine with the fake executor, and its data plane."""

    def __init__(self, worker_id: str, info: ProgramInfo | None = None, num_slots: int = 0) -> None:
        executor = FakeExecutor(info, step_time_s=STEP_TIME_S, num_slots=num_slots)
        limits = fake_limits(executor.info, max_num_seqs=12, max_batched_tokens=32)
        self.worker_id = worker_id
        self.engine = Engine(executor, limits, inbox_size=100, on_death=lambda _: None, check_cells=True)
        self._server = DataPlaneServer(self.engine, self.engine.start(), worker_id, SECRET, 12, "127.0.0.1")

    async def start(self) -> Member:
        return Member(self.worker_id, await self._server.start())

    async def die(self) -> None:
        """Its streams are cut where they are."""
        await self._server.stop(0)
        await asyncio.to_thread(self.engine.stop)

    async def end(self) -> None:
        """As a worker that is scaled away when its time to drain is over at once: it gives up what it runs."""
        await self._server.drain(0.01)
        await asyncio.to_thread(self.engine.stop)
        await self._server.stop(1)


class Company:
    """A fleet whose workers come and go."""

    def __init__(
        self, num_workers: int, max_failovers: int, info: ProgramInfo | None = None, num_slots: int = 0
    ) -> None:
        limits = FailoverLimits(max_failovers=max_failovers)
        self.streams = Streams("served", SECRET, Router(max_waiting=1000), limits)
        self.workers = [EngineWorker(f"w{number}", info, num_slots) for number in range(num_workers)]
        self._info = info
        self._num_slots = num_slots
        self._members: dict[str, Member] = {}
        self._num_hired = num_workers

    async def start(self) -> None:
        self._members = {worker.worker_id: await worker.start() for worker in self.workers}
        self.streams.set_members(self._members)
        await until(lambda: len(self.streams._router.infos) == len(self.workers))

    async def replace(self, victim: EngineWorker, *, killed: bool) -> None:
        """The victim goes; the membership hears of it a little later, and of another worker with it."""
        await (victim.die() if killed else victim.end())
        self.workers.remove(victim)
        worker = EngineWorker(f"w{self._num_hired}", self._info, self._num_slots)
        self._num_hired += 1
        self.workers.append(worker)
        del self._members[victim.worker_id]
        self._members[worker.worker_id] = await worker.start()
        self.streams.set_members(dict(self._members))

    async def close(self) -> None:
        await self.streams.close()
        for worker in self.workers:
            await worker.die()
