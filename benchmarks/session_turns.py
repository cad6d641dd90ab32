"""What a session costs a request: the same turns with a session and without, through the real service.

An executor that computes nothing runs the turns, so that what is left is plumbing: a turn on a session asks the owner
of the sessions twice before its first token and once behind its last. Turns of both kinds alternate.

    python -m benchmarks.session_turns
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.configured_service import configured_service
from benchmarks.record import record
from benchmarks.storm_service import MODEL_NAME, settings_of
from tests.service_process import tiny_checkpoint

BODY = {"model": MODEL_NAME, "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True}


class Client:
    """One conversation: a turn with a session, then one without, and so on. Times in seconds."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.with_session: list[float] = []
        self.without: list[float] = []

    async def run(self, num_turns: int) -> None:
        opened = (await self._http.post("/v1/sessions")).raise_for_status()
        body = BODY | {"session_id": opened.json()["id"]}
        for _ in range(num_turns):
            self.with_session.append(await self._timed(body))
            self.without.append(await self._timed(BODY))

    async def _timed(self, body: dict[str, Any]) -> float:
        asked_at = time.perf_counter()
        (await self._http.post("/v1/completions", json=body)).raise_for_status()
        return time.perf_counter() - asked_at


async def level(url: str, num_clients: int, num_turns: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        clients = [Client(http) for _ in range(num_clients)]
        await asyncio.gather(*(client.run(num_turns) for client in clients))
    return {
        "clients": num_clients,
        "with_session_ms": _told([took for client in clients for took in client.with_session]),
        "without_ms": _told([took for client in clients for took in client.without]),
    }


def _told(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: round(1000 * ordered[int(len(ordered) * part)], 2) for name, part in (("p50", 0.5), ("p99", 0.99))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="of each kind and client")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-gateways", type=int, default=1)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_checkpoint(Path(folder)))
        more = {"num_workers": 1, "num_gateways": args.num_gateways, "executor": "tests.served_fake:make_executor"}
        with configured_service(settings_of(model, "a benchmark's secret", **more)) as service:
            asyncio.run(level(service.url, 1, 10))
            levels = [asyncio.run(level(service.url, num_clients, args.turns)) for num_clients in args.clients]
    record("session_turns", vars(args), {"levels": levels}, keep=not args.trial)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
