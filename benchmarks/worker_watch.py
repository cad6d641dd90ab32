"""Watches workers from outside, as another gateway that asks nothing: snapshots ride on every step's message.

So cells and sequences are seen as each step ends, without asking anybody. Not for tests of the data plane itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import psutil

from planner.limits import Snapshot
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc as pb_grpc
from worker.wire import CHANNEL_OPTIONS, SECRET_METADATA, snapshot_from_proto

HELLO_S = 5.0
FOLLOW_S = 0.5


@dataclass(slots=True, eq=False)
class WatchedWorker:
    """A worker's process, identity and address, its last snapshot, and (monotonic time, sequences that run or wait)
    after each step that was told."""

    pid: int
    worker_id: str
    address: str
    snapshot: Snapshot | None = None
    history: list[tuple[float, int]] = field(default_factory=list)

    def take(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.history.append((time.monotonic(), snapshot.num_running + snapshot.num_waiting))

    def num_live_at(self, moment: float) -> int:
        """Sequences there at that time, as last told before it."""
        told = [count for at, count in self.history if at <= moment]
        return told[-1] if told else 0


class Watch:
    """All workers of a service, as they come and go. Owner: one task, which makes it and calls `close`.

    `processes` lists the processes that may be workers; it may block.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]], secret: str) -> None:
        self._processes = processes
        self._secret = secret
        self._tasks: dict[WatchedWorker, asyncio.Task[None]] = {}
        self._following = asyncio.create_task(self._follow())
        self.seen: list[WatchedWorker] = []

    @property
    def alive(self) -> list[WatchedWorker]:
        """Workers that serve, the longest watched first."""
        return [worker for worker, task in self._tasks.items() if not task.done()]

    @property
    def is_idle(self) -> bool:
        """Whether every worker has said that nothing runs, waits or is owned there, and that all cells are accounted
        for."""
        told = [worker.snapshot for worker in self.alive]
        return all(
            s is not None
            and (s.num_running, s.num_waiting, s.owned_cells) == (0, 0, 0)
            and s.free_cells + s.cached_cells == s.capacity
            for s in told
        )

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Until so many workers serve. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while len(self.alive) < count or any(worker.snapshot is None for worker in self.alive):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not self.is_idle:  # noqa: ASYNC110 - snapshots come without an event
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        tasks = [self._following, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            known = {worker.pid for worker in self.alive}
            for process in await asyncio.to_thread(self._processes):
                if process.pid in known or (worker := await find_worker(process, self._secret)) is None:
                    continue
                self.seen.append(worker)
                self._tasks[worker] = asyncio.create_task(_watch(worker, self._secret))
            await asyncio.sleep(FOLLOW_S)


@asynccontextmanager
async def watched(processes: Callable[[], list[psutil.Process]], secret: str) -> AsyncIterator[Watch]:
    watch = Watch(processes, secret)
    try:
        yield watch
    finally:
        await watch.close()


async def find_worker(process: psutil.Process, secret: str) -> WatchedWorker | None:
    """The worker of a process, found by asking at each port that it listens on; None if none of them is a worker's."""
    try:
        listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return None
    for place in listening:
        host = place.ip.removeprefix("::ffff:")
        address = f"{'127.0.0.1' if host in ('::', '0.0.0.0') else host}:{place.port}"
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = pb_grpc.WorkerStub(channel).Attach(metadata=((SECRET_METADATA, secret),), timeout=HELLO_S)
            with suppress(grpc.aio.AioRpcError):
                hello = await call.read()
                if isinstance(hello, pb.StepUpdates):
                    return WatchedWorker(process.pid, hello.info.worker_id, address)
            call.cancel()
    return None


async def _watch(worker: WatchedWorker, secret: str) -> None:
    async with grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS) as channel:
        call = pb_grpc.WorkerStub(channel).Attach(metadata=((SECRET_METADATA, secret),))
        num_read = 0
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the worker ended
            async for message in call:
                if message.HasField("snapshot"):
                    worker.take(snapshot_from_proto(message.snapshot))
                if not message.HasField("info"):
                    num_read += 1
                    await call.write(pb.Command(read=pb.Read(num_messages=num_read)))
