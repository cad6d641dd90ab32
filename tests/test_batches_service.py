"""A batch on a real service: it runs while clients chat, and goes on where it was after the service was restarted."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service_process import ServiceProcess, running_service, tiny_checkpoint, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

NUM_LINES = 36
LINE_TOKENS = 60  # more than a second at the fake's pace
CHAT_TOKENS = 5
URL = "/v1/chat/completions"


@contextmanager
def serving(model: Path, store: Path) -> Iterator[tuple[ServiceProcess, httpx.Client]]:
    """A worker of eight seats, of which a batch takes six at most."""
    arguments = [str(model), "--served-model-name", "tiny", "--device", "cpu", "--host", "127.0.0.1"]
    arguments += ["--num-workers", "1", "--max-num-seqs", "8", "--batch-store", str(store), "--drain-timeout-s", "5"]
    with running_service(*arguments, "--executor", "tests.served_fake:make_executor") as service:
        service.wait_for_line("ready at", 180)
        with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
            yield service, client
        service.end(60)


def chat(text: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}


def begin(client: httpx.Client) -> str:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": chat(f"{number}", LINE_TOKENS)}
        for number in range(NUM_LINES)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    asked = {"input_file_id": sent.raise_for_status().json()["id"], "endpoint": URL, "completion_window": "24h"}
    batch_id: str = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    return batch_id


def batch_of(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    told: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
    return told


def results_in(store: Path) -> dict[str, str]:
    """The id of each answer that lies in the store, by the line that it answers."""
    with closing(sqlite3.connect(store / "batches.sqlite")) as database:
        records = [json.loads(text) for (text,) in database.execute("SELECT record FROM results")]
    return {record["custom_id"]: record["id"] for record in records}


def test_a_batch_runs_beside_chats_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    model, store = tiny_checkpoint(tmp_path), tmp_path / "store"
    with serving(model, store) as (_, client):
        batch_id = begin(client)
        wait_until(lambda: batch_of(client, batch_id)["request_counts"]["completed"] >= 6, 30, "the first lines")
        waits_s = []
        for number in range(5):
            asked_at = time.monotonic()
            answer = client.post(URL, json=chat(f"chat {number}", CHAT_TOKENS)).raise_for_status().json()
            waits_s.append(time.monotonic() - asked_at)
            assert answer["usage"]["completion_tokens"] == CHAT_TOKENS
        assert batch_of(client, batch_id)["status"] == "in_progress"
        assert sorted(waits_s)[2] < 1.0, f"a chat waits for whole lines of the batch: {waits_s}"
    before = results_in(store)
    assert 6 <= len(before) < NUM_LINES

    with serving(model, store) as (_, client):
        wait_until(lambda: batch_of(client, batch_id)["status"] == "completed", 90, "the batch")
        batch = batch_of(client, batch_id)
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        told = client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        records = {record["custom_id"]: record for record in map(json.loads, told.splitlines())}
        assert records.keys() == {f"line-{number}" for number in range(NUM_LINES)}
        assert len(told.splitlines()) == NUM_LINES
        assert {name: records[name]["id"] for name in before} == before, "a line that had its answer got another"
        for number in (0, NUM_LINES - 1):
            alone = client.post(URL, json=chat(f"{number}", LINE_TOKENS)).raise_for_status().json()
            said = records[f"line-{number}"]["response"]["body"]
            assert said["choices"][0]["message"] == alone["choices"][0]["message"]
            assert said["usage"]["completion_tokens"] == LINE_TOKENS
