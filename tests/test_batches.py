"""Files and batches over HTTP, on a scripted fleet and a real store: what is kept, run, refused, and outlives what."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.batches.api import Batches
from cluster.batches.desk import BatchDesk
from cluster.batches.line import LOWEST_PRIORITY
from cluster.batches.runner import BatchRunner
from cluster.batches.store import BatchStore
from cluster.models import single
from cluster.routing.fleet import WorkerReport
from cluster.routing.idle_room import num_allowed
from cluster.web.api import create_app
from planner.errors import ForwardFailed, InvalidConfiguration, QueueFull, WorkerLost
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports_of
from tests.http_desk import TEXT, Desk, desk, refusal, says, until
from tests.test_tools import ROOMY

CHAT_URL = "/v1/chat/completions"
PATIENCE_S = 20.0

T = TypeVar("T")


@asynccontextmanager
async def keeping(
    folder: Path,
    fleet: FakeFleet | None = None,
    clock: Any = None,
    store: BatchDesk | None = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    """A gateway with a store in `folder`; leaving it ends the gateway, and the folder stays."""
    fleet = fleet or FakeFleet(ROOMY, says("hi there"))
    fleet.reports = reports_of(num_seqs=8)
    models = single(Service(fleet, TEXT, ApiSettings(**settings)))
    store = store or BatchDesk(folder)
    runner = BatchRunner(models, store) if clock is None else BatchRunner(models, store, clock)
    runner.start()
    app = create_app(models, Batches(store, runner))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
            yield Desk(http, fleet, app)
    finally:
        await runner.close()
        await store.close()


def line(custom_id: str, url: str = CHAT_URL, **body: Any) -> dict[str, Any]:
    asked = body or {"messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


async def upload(d: Desk, lines: Sequence[Any]) -> str:
    data = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()
    answer = await d.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def begin(d: Desk, lines: Sequence[Any], endpoint: str = CHAT_URL) -> dict[str, Any]:
    asked = {"input_file_id": await upload(d, lines), "endpoint": endpoint, "completion_window": "24h"}
    answer = await d.post("/v1/batches", **asked, metadata={"mine": "1"})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    assert made["status"] == "validating"
    return made


async def ended(d: Desk, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch: dict[str, Any] = (await d.http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.02)


async def records(d: Desk, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    answer = await d.http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(one) for one in answer.text.splitlines()]


async def test_a_batch_answers_every_line_in_order_at_the_lowest_priority(tmp_path: Path) -> None:
    async with keeping(tmp_path) as d:
        names = [f"line {i}" for i in range(40)]
        batch = await ended(d, (await begin(d, [line(name) for name in names]))["id"])
        assert (batch["status"], batch["error_file_id"]) == ("completed", None)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch["metadata"] == {"mine": "1"}
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"] < batch["expires_at"]
        told = await records(d, batch["output_file_id"])
        assert [one["custom_id"] for one in told] == names
        assert {one["response"]["status_code"] for one in told} == {200}
        assert told[0]["response"]["body"]["choices"][0]["message"]["content"] == "hi there"
        assert {request.priority for request in d.fleet.requests} == {LOWEST_PRIORITY}


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hello"}, "text_completion"),
        ("/v1/embeddings", {"input": "hello"}, "list"),
        ("/v1/responses", {"input": "hello"}, "response"),
    ],
)
async def test_each_endpoint_answers_as_it_does_alone(
    tmp_path: Path, url: str, body: dict[str, Any], kind: str
) -> None:
    async with keeping(tmp_path) as d:
        batch = await ended(d, (await begin(d, [line("a", url, **body)], url))["id"])
        (told,) = await records(d, batch["output_file_id"])
        alone = (await d.post(url, **body)).json()
        assert told["response"]["body"]["object"] == kind
        assert told["response"]["body"].keys() == alone.keys()
        assert told["response"]["body"]["usage"] == alone["usage"]


async def test_a_line_that_cannot_be_has_its_own_error_and_the_others_their_answers(tmp_path: Path) -> None:
    async with keeping(tmp_path) as d:
        lines = [line("good"), line("hot", messages=[{"role": "user", "content": "x"}], temperature=-1)]
        lines += [line("streamed", messages=[{"role": "user", "content": "x"}], stream=True)]
        batch = await ended(d, (await begin(d, lines))["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        (good,) = await records(d, batch["output_file_id"])
        hot, streamed = await records(d, batch["error_file_id"])
        assert (good["custom_id"], hot["custom_id"], streamed["custom_id"]) == ("good", "hot", "streamed")
        assert hot["response"]["status_code"] == 400
        assert hot["response"]["body"]["error"]["param"] == "temperature"
        assert streamed["response"]["body"]["error"]["param"] == "stream"


async def test_a_failed_forward_is_the_lines_error_and_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    async with keeping(tmp_path) as d:
        d.fleet.refusal_at_submit = QueueFull("full")
        batch = await begin(d, [line("a")])
        await asyncio.sleep(0.4)
        assert (await d.http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
        d.fleet.refusal_at_submit = None
        assert (await ended(d, batch["id"]))["request_counts"]["completed"] == 1
        d.fleet.fail_after = (0, ForwardFailed("broken"))
        broken = await ended(d, (await begin(d, [line("a")]))["id"])
        (told,) = await records(d, broken["error_file_id"])
        assert told["response"]["body"]["error"]["code"] == "forward_failed"


async def test_a_line_that_keeps_losing_its_workers_is_given_up(tmp_path: Path) -> None:
    fleet = FakeFleet(ROOMY, says("hi there"), fail_after=(1, WorkerLost("the worker is gone")))
    async with keeping(tmp_path, fleet) as d:
        batch = await ended(d, (await begin(d, [line("a killer")]))["id"])
        (told,) = await records(d, batch["error_file_id"])
        assert told["response"]["body"]["error"]["code"] == "worker_lost"
        assert len(fleet.generations) == 3


async def test_a_store_that_fails_once_ends_no_runner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FailingOnce(BatchDesk):
        has_failed = False

        async def ask(self, question: Callable[[BatchStore], T]) -> T:
            if not self.has_failed:
                self.has_failed = True
                raise sqlite3.OperationalError("database is locked")
            return await super().ask(question)

    store = FailingOnce(tmp_path)
    async with keeping(tmp_path, store=store) as d:
        await until(lambda: store.has_failed)
        batch = await ended(d, (await begin(d, [line("one")]))["id"])
        assert batch["status"] == "completed"
    assert "database is locked" in caplog.text


async def test_a_file_that_is_no_batch_fails_it_and_says_where(tmp_path: Path) -> None:
    async with keeping(tmp_path, max_batch_lines=4) as d:
        lines = [line("a"), "{not json", line("a"), line("b", "/v1/completions"), {"custom_id": "c"}]
        batch = await ended(d, (await begin(d, lines))["id"])
        assert (batch["status"], batch["output_file_id"]) == ("failed", None)
        assert [(one["line"], one["code"]) for one in batch["errors"]["data"]] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "mismatched_url"),
            (5, "invalid_json_line"),
        ]
        empty = await ended(d, (await begin(d, [""]))["id"])
        assert [one["code"] for one in empty["errors"]["data"]] == ["empty_file"]
        many = await ended(d, (await begin(d, [line(str(i)) for i in range(5)]))["id"])
        assert [one["code"] for one in many["errors"]["data"]] == ["too_many_lines"]
        assert not d.fleet.requests


async def test_a_batch_outlives_its_gateway_and_answers_no_line_twice(tmp_path: Path) -> None:
    fleet = FakeFleet(ROOMY, says("hi"))
    async with keeping(tmp_path, fleet) as d:
        batch = await begin(d, [line(str(i)) for i in range(60)])
        await until(lambda: len(fleet.generations) >= 20)
        fleet.gate.clear()
        done = (await d.http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"]
        assert 0 < done < 60
    assert fleet.num_running == 0, "what ran was ended with its gateway"
    fleet.gate.set()
    before = len(fleet.generations)
    async with keeping(tmp_path, fleet) as d:
        after = await ended(d, batch["id"])
        assert after["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert [one["custom_id"] for one in await records(d, after["output_file_id"])] == [str(i) for i in range(60)]
        assert len(fleet.generations) - before <= 60 - done


async def test_two_gateways_share_a_store_and_each_line_is_answered_once(tmp_path: Path) -> None:
    fleet = FakeFleet(ROOMY, says("hi"))
    async with keeping(tmp_path, fleet) as first, keeping(tmp_path, fleet) as second:
        batches = [await begin(d, [line(str(i)) for i in range(10)]) for d in (first, second, first)]
        for batch in batches:
            assert (await ended(second, batch["id"]))["request_counts"]["completed"] == 10
    assert len(fleet.generations) == 30


async def test_cancelling_ends_what_runs_and_tells_of_the_rest(tmp_path: Path) -> None:
    async with keeping(tmp_path) as d:
        batch = await begin(d, [line(str(i)) for i in range(30)])
        await until(lambda: len(d.fleet.generations) >= 10)
        d.fleet.gate.clear()
        cancelling = (await d.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling"
        after = await ended(d, batch["id"])
        assert after["status"] == "cancelled"
        assert after["cancelling_at"] <= after["cancelled_at"]
        counts = after["request_counts"]
        assert counts["total"] == 30 == counts["completed"] + counts["failed"]
        told = await records(d, after["error_file_id"])
        assert {one["error"]["code"] for one in told} == {"batch_cancelled"}
        assert len(told) == counts["failed"] > 0
        assert d.fleet.num_running == 0
        again = refusal(await d.post(f"/v1/batches/{batch['id']}/cancel"))
        assert again["param"] == "batch_id"


async def test_a_batch_whose_window_is_over_expires(tmp_path: Path) -> None:
    now = [0.0]
    async with keeping(tmp_path, clock=lambda: now[0]) as d:
        d.fleet.gate.clear()
        batch = await begin(d, [line("a"), line("b")])
        await until(lambda: len(d.fleet.generations) == 2)
        now[0] = batch["expires_at"] + 1
        after = await ended(d, batch["id"])
        assert after["status"] == "expired"
        assert [one["error"]["code"] for one in await records(d, after["error_file_id"])] == ["batch_expired"] * 2


async def test_files_are_listed_read_and_deleted_by_their_owner_alone(tmp_path: Path) -> None:
    keys = {"api_keys": ("one", "two")}
    async with keeping(tmp_path, **keys) as d:
        d.http.headers["authorization"] = "Bearer one"
        ids = [await upload(d, [line(str(i))]) for i in range(3)]
        listed = (await d.http.get("/v1/files", params={"limit": 2})).json()
        assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([ids[2], ids[1]], True)
        rest = (await d.http.get("/v1/files", params={"limit": 2, "after": ids[1]})).json()
        assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([ids[0]], False)
        oldest = (await d.http.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
        assert ([one["id"] for one in oldest["data"]], oldest["has_more"]) == ([ids[0], ids[1]], True)
        last = (await d.http.get("/v1/files", params={"order": "asc", "after": ids[1]})).json()
        assert ([one["id"] for one in last["data"]], last["has_more"]) == ([ids[2]], False)
        card = (await d.http.get(f"/v1/files/{ids[0]}")).json()
        content = (await d.http.get(f"/v1/files/{ids[0]}/content")).content
        assert (card["filename"], card["purpose"], card["bytes"]) == ("in.jsonl", "batch", len(content))
        batch = await ended(d, (await begin(d, [line("x")]))["id"])
        outputs = (await d.http.get("/v1/files", params={"purpose": "batch_output"})).json()["data"]
        assert [one["id"] for one in outputs] == [batch["output_file_id"]]
        d.http.headers["authorization"] = "Bearer two"
        assert (await d.http.get("/v1/files")).json()["data"] == []
        assert (await d.http.get("/v1/batches")).json()["data"] == []
        for path in (f"/v1/files/{ids[0]}", f"/v1/files/{ids[0]}/content", f"/v1/batches/{batch['id']}"):
            assert refusal(await d.http.get(path), 404)["code"] in ("file_not_found", "batch_not_found")
        refusal(await d.http.delete(f"/v1/files/{ids[0]}"), 404)
        d.http.headers["authorization"] = "Bearer one"
        assert (await d.http.delete(f"/v1/files/{ids[0]}")).json()["deleted"] is True
        refusal(await d.http.get(f"/v1/files/{ids[0]}"), 404)
        assert [one["id"] for one in (await d.http.get("/v1/batches")).json()["data"]] == [batch["id"]]


async def test_what_is_too_much_or_no_file_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    async with keeping(tmp_path, max_file_bytes=1000, max_files_per_key=1, max_open_batches_per_key=1) as d:
        big = await d.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x" * 200_000)})
        assert refusal(big, 413)["param"] == "file"
        tune = await d.http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("x", b"x")})
        assert refusal(tune)["param"] == "purpose"
        assert refusal(await d.http.post("/v1/files", data={"purpose": "batch"}))["param"] == "file"
        assert refusal(await d.post("/v1/files", purpose="batch"))["param"] == "file"
        for limit in (0, "000000001" + "9" * 5000):
            assert refusal(await d.http.get("/v1/files", params={"limit": limit}))["param"] == "limit"
        asked = {"endpoint": CHAT_URL, "completion_window": "24h"}
        assert refusal(await d.http.get("/v1/files", params={"order": "up"}))["param"] == "order"
        assert refusal(await d.http.get("/v1/files", params={"before": "x"}))["param"] == "before"
        assert refusal(await d.http.get("/v1/batches", params={"order": "asc"}))["param"] == "order"
        unknown = refusal(await d.post("/v1/batches", **asked, input_file_id="file-none"), 404)
        assert unknown["param"] == "input_file_id"
        odd = {**asked, "endpoint": "/v1/moderations", "input_file_id": "f"}
        assert refusal(await d.post("/v1/batches", **odd))["param"] == "endpoint"
        d.fleet.gate.clear()
        file_id = await upload(d, [line("a")])
        second = await d.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x")})
        assert refusal(second, 429)["code"] == "queue_full"
        assert (await d.post("/v1/batches", **asked, input_file_id=file_id)).status_code == 200
        assert refusal(await d.post("/v1/batches", **asked, input_file_id=file_id), 429)["code"] == "queue_full"
        assert refusal(await d.http.delete(f"/v1/files/{file_id}"))["param"] == "file_id"
        assert len(list((tmp_path / "files").iterdir())) == 1


async def test_without_a_store_every_endpoint_says_so() -> None:
    async with desk() as d:
        for path in ("/v1/files", "/v1/files/f", "/v1/files/f/content", "/v1/batches", "/v1/batches/b"):
            assert "batch_store" in refusal(await d.http.get(path))["message"]
        assert "batch_store" in refusal(await d.post("/v1/batches"))["message"]
        assert "batch_store" in refusal(await d.http.post("/v1/files"))["message"]


def busy(num_running: int, num_waiting: int = 0) -> Sequence[WorkerReport]:
    return reports_of(num_seqs=8, num_running=num_running, num_waiting=num_waiting)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "num_inside", "allowed"),
    [(0, 0, 0, 6), (6, 0, 6, 6), (4, 0, 0, 3), (8, 0, 0, 0), (8, 6, 6, 0), (7, 0, 0, 1), (2, 4, 6, 6)],
)
def test_idle_work_takes_three_quarters_of_what_others_leave(
    num_running: int, num_waiting: int, num_inside: int, allowed: int
) -> None:
    assert num_allowed(busy(num_running, num_waiting), num_inside) == allowed


def test_a_store_that_cannot_be_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").mkdir()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(InvalidConfiguration, match=f"batch_store is {folder}, where nothing can be kept: "):
            BatchDesk(folder)
