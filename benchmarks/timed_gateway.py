"""A program: a gateway without Serve whose router times itself, to tell the router's share of a request's latency.

Run as `python -m benchmarks.timed_gateway MODEL NAME SECRET ADDRESSES`, where ADDRESSES is JSON of worker ids and their
host:port. Prints its URL; when its standard input ends it prints one line of JSON, a `RouterTimes`, and ends.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks.bare_gateway import bare_gateway
from cluster.routing.router import Router
from planner.blocks import BlockChanges
from planner.limits import Snapshot
from planner.request import Request

ENDED_WITHIN_S = 30.0


@dataclass(slots=True)
class RouterTimes:
    """Seconds. Of each request: in `Router.assign`; in all of the router's work for it alone; from its assignment to
    its first token and to its end. In all: what workers told (`told_s`, in `num_told` messages), and processor time."""

    assign_s: list[float] = field(default_factory=list)
    router_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    num_told: int = 0
    told_s: float = 0.0
    processor_s: float = 0.0


@dataclass(slots=True)
class _Request:
    begun: float
    assign_s: float
    settle_s: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0


class TimedRouter(Router):
    """A router that keeps the time of each call."""

    def __init__(self, *, max_waiting: int) -> None:
        super().__init__(max_waiting=max_waiting)
        self.num_told = 0
        self.told_s = 0.0
        self._requests: dict[int, _Request] = {}

    def assign(
        self, request_id: int, request: Request, *, owner: str | None = None, avoid: Collection[str] = ()
    ) -> str:
        begun = time.perf_counter()
        worker_id = super().assign(request_id, request, owner=owner, avoid=avoid)
        self._requests[request_id] = _Request(begun, time.perf_counter() - begun)
        return worker_id

    def observe(self, worker_id: str, snapshot: Snapshot, *, draining: bool, newest_request: int) -> None:
        begun = time.perf_counter()
        super().observe(worker_id, snapshot, draining=draining, newest_request=newest_request)
        self.told_s += time.perf_counter() - begun
        self.num_told += 1

    def learn(self, worker_id: str, changes: BlockChanges) -> None:
        begun = time.perf_counter()
        super().learn(worker_id, changes)
        self.told_s += time.perf_counter() - begun

    def settle(self, worker_id: str, request_id: int, num_cached_tokens: int | None = None) -> None:
        begun = time.perf_counter()
        super().settle(worker_id, request_id, num_cached_tokens)
        request = self._requests[request_id]
        request.last_at = time.perf_counter()
        request.settle_s += request.last_at - begun
        if request.first_at is None and num_cached_tokens is not None:
            request.first_at = request.last_at

    def times(self) -> RouterTimes:
        """Of the requests that have had a token."""
        begun = [request for request in self._requests.values() if request.first_at is not None]
        return RouterTimes(
            assign_s=[request.assign_s for request in begun],
            router_s=[request.assign_s + request.settle_s for request in begun],
            first_token_s=[(request.first_at or 0.0) - request.begun for request in begun],
            latency_s=[request.last_at - request.begun for request in begun],
            num_told=self.num_told,
            told_s=self.told_s,
            processor_s=time.process_time(),
        )


class TimedGateway:
    """The asking side: a gateway in a process of its own. `times` ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def times(self) -> RouterTimes:
        out, _ = self._process.communicate(timeout=ENDED_WITHIN_S)
        return RouterTimes(**json.loads(out))


@contextmanager
def timed_gateway(model: str, model_name: str, secret: str, addresses: Mapping[str, str]) -> Iterator[TimedGateway]:
    """Ready when the block begins; blocks the caller until then."""
    command = [sys.executable, "-m", "benchmarks.timed_gateway", model, model_name, secret, json.dumps(addresses)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield TimedGateway(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


async def main(model: str, model_name: str, secret: str, addresses: Mapping[str, str]) -> None:
    router = TimedRouter(max_waiting=2048)
    async with bare_gateway(model, model_name, secret, addresses, router) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        times = router.times()
    print(json.dumps(asdict(times)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
