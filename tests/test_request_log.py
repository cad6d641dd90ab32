"""The line that is logged of each request that asks for tokens: what it has, and that no text of anybody is in it."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest

from cluster import request_log
from cluster.request_record import RequestRecord
from planner.errors import QueueFull, WorkerLost
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import grpc_desk
from tests.http_desk import MODEL, PROMPT, RawClient, desk, says, until

SECRETS = ("hello", "hi there", "sk-key")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    told = [record.getMessage() for record in caplog.records if record.name == "raycomb.requests"]
    assert not [line for line in told if any(secret in line for secret in SECRETS)]
    return [json.loads(line) for line in told]


async def test_each_request_is_one_line_by_its_id_that_says_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raycomb.requests")
    fleet = FakeFleet(MODEL, says("hi there"))
    key = {"authorization": "Bearer sk-key"}
    async with desk(fleet=fleet, api_keys=("sk-key",)) as d:
        headers = key | {"x-request-id": "first", "x-tenant": "acme"}
        await d.http.post("/v1/completions", json=PROMPT, headers=headers)
        await d.http.post("/v1/completions", json=PROMPT | {"temperature": -1}, headers=key | {"x-request-id": "bad"})
        await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "stranger"})
        fleet.refusal_at_submit = QueueFull("full")
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {"x-request-id": "full"})
        fleet.refusal_at_submit, fleet.fail_after = None, (1, WorkerLost("gone"))
        await d.http.post("/v1/completions", json=PROMPT, headers=key | {"x-request-id": "lost"})
        await d.http.get("/v1/models", headers=key)
    whole, bad, stranger, full, lost = lines(caplog)
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


async def test_a_client_that_left_is_told_from_one_that_was_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raycomb.requests")
    fleet = FakeFleet(MODEL, says("hi there"))
    fleet.gate.clear()
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, dict(PROMPT))
        serving = asyncio.create_task(client.run())
        await until(lambda: fleet.num_running == 1)
        client.leave.set()
        await serving
    (left,) = lines(caplog)
    assert left["client_left"] is True
    assert "status" not in left


async def test_calls_are_logged_like_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raycomb.requests")
    async with grpc_desk(says("hi there")) as client:
        await client.generate([("x-request-id", "mine")], max_tokens=4)
    (line,) = lines(caplog)
    assert (line["request_id"], line["request"], line["tokens"]) == ("mine", "raycomb.v1.Inference/Generate", 4)


async def test_nothing_is_logged_where_nobody_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with desk() as d:
        await d.post("/v1/completions", **PROMPT)
    assert lines(caplog) == []


class Tells(logging.Filter):
    """As a filter of Serve's: adds what it knows to records that do not say that they need nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "skip_context_filter", False):
            self.num_asked += 1
            vars(record).update(replica="gateway 7", task_name="the constructor")
        return True


class Counted(logging.Formatter):
    num_texts = 0

    def format(self, record: logging.LogRecord) -> str:
        self.num_texts += 1
        return f"{vars(record)['replica']} {vars(record)['request_id']} {record.getMessage()}"


def test_what_all_lines_have_is_asked_once_and_each_text_is_made_once(tmp_path: Path) -> None:
    destination = logging.Logger("a log", logging.INFO)
    file = logging.handlers.RotatingFileHandler(tmp_path / "log", maxBytes=10_000, backupCount=1)
    tells, counted = Tells(), Counted()
    file.setFormatter(counted)
    through = logging.handlers.MemoryHandler(1, target=file)
    through.addFilter(tells)
    destination.addHandler(through)
    before = request_log.logger.parent
    try:
        request_log.log_requests_to(destination, "raycomb")
        for number in range(3):
            RequestRecord("POST /v1/completions", f"request-{number}").finish()
    finally:
        request_log.logger.parent = before
        request_log.logger.filters.clear()
        through.close()
        file.close()
    written = [line.split(" ", 3) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line[:3] for line in written] == [["gateway", "7", f"request-{number}"] for number in range(3)]
    assert [json.loads(line[3])["request_id"] for line in written] == [f"request-{number}" for number in range(3)]
    assert (tells.num_asked, counted.num_texts) == (1, 3)
