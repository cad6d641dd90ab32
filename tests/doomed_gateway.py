"""A program: a gateway's fleet that submits requests to one worker and reads them until it is killed.

Run as `python -m tests.doomed_gateway ADDRESS SECRET NUM_REQUESTS` by a test. Prints a line when each has a token.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from tests.fakes import fake_request

FOREVER = 900


async def main(address: str, secret: str, num_requests: int) -> None:
    streams = Streams("served", secret, Router(max_waiting=1000))
    streams.set_members({"worker-1": Member("worker-1", address)})
    while not streams.ready:  # noqa: ASYNC110 - the fleet has no event for it
        await asyncio.sleep(0.01)
    generations = [streams.submit(fake_request([1, key + 1], FOREVER, n=2)) for key in range(num_requests)]
    for generation in generations:
        await generation.next()
    print("all run", flush=True)
    await asyncio.gather(*(read(generation) for generation in generations))


async def read(generation: RemoteGeneration) -> None:
    while True:
        await generation.next()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
