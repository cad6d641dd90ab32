"""The line of each request that asks for tokens: what it has, that no text of anybody is in it, and where it lies."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from cluster.telemetry.request_log import RequestLog, request_log_beside
from planner.errors import QueueFull, WorkerLost
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import grpc_desk
from tests.http_desk import MODEL, PROMPT, RawClient, desk, says, until

SECRETS = ("hello", "hi there", "sk-key")


class Told(list[dict[str, Any]]):
    """What was told of requests, in their order."""

    def __call__(self, told: dict[str, Any]) -> None:
        assert not [secret for secret in SECRETS if secret in json.dumps(told)]
        self.append(told)


async def test_each_request_is_one_line_by_its_id_that_says_how_it_ended() -> None:
    lines = Told()
    fleet = FakeFleet(MODEL, says("hi there"))
    key = {"authorization": "Bearer sk-key"}
    async with desk(fleet=fleet, tell=lines, api_keys=("sk-key",)) as d:
        headers = key | {"x-request-id": "first", "x-tenant": "acme"}
        await d.http.post("/v1/completions", json=PROMPT, headers=headers)
        await d.http.post("/v1/completions", json=PROMPT | {"temperature": -1}, headers=key | {"x-request-id": "bad"})
        await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "stranger"})
        fleet.refusal_at_submit = QueueFull("full")
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {"x-request-id": "full"})
        fleet.refusal_at_submit, fleet.fail_after = None, (1, WorkerLost("gone"))
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {"x-request-id": "lost"})
        await d.http.get("/v1/models", headers=key)
    whole, bad, stranger, full, lost = lines
    assert 0 < whole.pop("first_token_s") <= whole.pop("seconds")
    assert whole == {
        "request_id": "first",
        "request": "POST /v1/completions",
        "tenant": "acme",
        "status": 200,
        "prompt_tokens": 1,
        "tokens": 8,
        "finish_reasons": ["stop"],
    }
    ends = [(one["request_id"], one["status"], one["error"]) for one in (bad, stranger, full, lost)]
    assert ends == [
        ("bad", 400, "invalid_request"),
        ("stranger", 401, "unauthenticated"),
        ("full", 429, "queue_full"),
        ("lost", 503, "worker_lost"),
    ]


async def test_a_client_that_left_is_told_from_one_that_was_answered() -> None:
    lines = Told()
    fleet = FakeFleet(MODEL, says("hi there"))
    fleet.gate.clear()
    async with desk(fleet=fleet, tell=lines) as d:
        client = RawClient(d.app, dict(PROMPT))
        serving = asyncio.create_task(client.run())
        await until(lambda: fleet.num_running == 1)
        client.leave.set()
        await serving
    (left,) = lines
    assert left["client_left"] is True
    assert "status" not in left


async def test_calls_are_logged_like_requests() -> None:
    lines = Told()
    async with grpc_desk(says("hi there"), tell=lines) as client:
        await client.generate([("x-request-id", "mine")], max_tokens=4)
    (line,) = lines
    assert (line["request_id"], line["request"], line["tokens"]) == ("mine", "raycomb.v1.Inference/Generate", 4)


def test_lines_have_their_time_and_a_file_that_is_full_is_put_aside(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", max_bytes=250, num_kept=2)
    for number in range(10):
        log.write({"request_id": f"request-{number}", "tokens": 7})
    log.close()
    log.write({"request_id": "late"})
    files = [tmp_path / name for name in ("log.2", "log.1", "log")]
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert all(file.stat().st_size <= 250 for file in files)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    numbers = [int(line["request_id"].removeprefix("request-")) for line in lines]
    assert numbers == list(range(numbers[0], 10))
    assert len(numbers) > 4
    assert abs((datetime.fromisoformat(lines[-1]["time"]) - datetime.now(UTC)).total_seconds()) < 60


def test_a_disk_that_takes_no_more_ends_the_log_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"), max_bytes=0, num_kept=0)
    log.write({"request_id": "first"})
    log.write({"request_id": "second"})
    assert caplog.text.count("no request is logged any more") == 1


@pytest.mark.parametrize("buffered", [True, False])
def test_the_file_lies_beside_the_process_own(tmp_path: Path, buffered: bool) -> None:
    file = RotatingFileHandler(tmp_path / "replica_7.log", maxBytes=99, backupCount=3, delay=True)

    def process_log(level: int, *handlers: logging.Handler) -> logging.Logger:
        log = logging.Logger("of a process", level)
        log.handlers = [logging.NullHandler(), *handlers]
        return log

    handler = MemoryHandler(1, target=file) if buffered else file
    log = request_log_beside(process_log(logging.INFO, handler))
    assert log is not None
    assert log.path == tmp_path / "replica_7_requests.log"
    log.close()
    assert request_log_beside(process_log(logging.WARNING, handler)) is None
    assert request_log_beside(process_log(logging.INFO)) is None
