"""How many turns one owner of sessions can take: the processor time that a turn costs it, by the length of histories.

The owner is a process of its own that listens as the service's does; conversations in this one ask it as a gateway
does (look, begin, end), all at a time. The owner is one event loop, so the most turns a second
are one over the processor seconds of a turn, whatever the machine's other cores do.

    python -m benchmarks.session_owner
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import psutil

from benchmarks.record import record
from cluster.sessions.histories import SessionLimits, Sessions
from cluster.sessions.remote import RemoteOwner
from cluster.sessions.server import SessionServer

SECRET: Final = "a benchmark's secret"
CONTEXT: Final = 131_072
DELTA: Final = list(range(100, 150))
GENERATED: Final = list(range(200, 350))
"""A turn's own tokens: a short question and a longer answer."""


def serve(told: Connection) -> None:
    """The owner's process: tells its address, and ends when it is told anything."""

    async def run() -> None:
        server = SessionServer(Sessions(SessionLimits(100_000, 100_000, 3600.0)), SECRET, "127.0.0.1")
        told.send(await server.start())
        await asyncio.to_thread(told.recv)
        await server.stop()

    asyncio.run(run())


async def converse(owner: RemoteOwner, history: int, num_turns: int, took_s: list[float]) -> None:
    """A session that begins with so many tokens, and its turns, each of which is one more of 200 tokens."""
    session = await owner.open("")
    begun = await owner.begin(session.id, "", range(history), 1, CONTEXT)
    await owner.end(begun.turn_id, [1], failed=False)
    for _ in range(num_turns):
        asked_at = time.perf_counter()
        await owner.get(session.id, "")
        begun = await owner.begin(session.id, "", DELTA, len(GENERATED), CONTEXT)
        took_s.append(time.perf_counter() - asked_at)
        assert await owner.end(begun.turn_id, GENERATED, failed=False)
    await owner.close(session.id, "")


async def level(address: str, process: psutil.Process, history: int, num_conversations: int, num_turns: int) -> Any:
    owner = RemoteOwner(SECRET)
    owner.set_address(address)
    took_s: list[float] = []
    await converse(owner, history, 3, [])
    before, begun_at = process.cpu_times(), time.perf_counter()
    await asyncio.gather(*(converse(owner, history, num_turns, took_s) for _ in range(num_conversations)))
    after, seconds = process.cpu_times(), time.perf_counter() - begun_at
    await owner.shut()
    used_s = after.user + after.system - before.user - before.system
    num = num_conversations * num_turns
    return {
        "history_tokens": history,
        "turns": num,
        "turns_per_s": round(num / seconds, 1),
        "owner_core_share": round(used_s / seconds, 3),
        "owner_us_per_turn": round(1e6 * used_s / num, 1),
        "most_turns_per_s": round(num / used_s),
        "look_and_begin_p50_ms": _rank(took_s, 0.5),
        "look_and_begin_p99_ms": _rank(took_s, 0.99),
    }


def _rank(seconds: Sequence[float], part: float) -> float:
    return round(1e3 * sorted(seconds)[int(len(seconds) * part)], 3)


def measure(histories: Sequence[int], num_conversations: int, num_turns: int) -> list[Any]:
    """One level after the other, of one owner."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    try:
        address = here.recv()
        watched = psutil.Process(process.pid)
        return [asyncio.run(level(address, watched, history, num_conversations, num_turns)) for history in histories]
    finally:
        here.send("over")
        process.join(10)
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, nargs="+", default=[100, 1000, 8000, 32_000])
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    levels = measure(args.histories, args.conversations, args.turns)
    record("session_owner", vars(args), {"levels": levels}, keep=not args.trial)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
