"""What `/metrics` says, read by Prometheus' own parser, after requests that ended in every way."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.models import single
from cluster.telemetry.metric import PREFIX, Kind
from cluster.telemetry.service_metrics import METRICS
from cluster.web.api import create_app
from planner.errors import DeadlineUnmeetable, QueueFull, WorkerLost
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports
from tests.http_desk import CHAT, MODEL, PROMPT, TEXT, Desk, RawClient, desk, says, until

ROOT = Path(__file__).parent.parent
Values = dict[str, float]


async def metrics(d: Desk) -> Values:
    """Every sample as `name{label="value",...}`, without the labels that tell processes apart."""
    answer = await d.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: Values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "gateway")}
            told = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            found[f"{sample.name.removeprefix('raycomb_')}{{{told}}}" if told else sample.name[8:]] = sample.value
    return found


async def test_every_metric_is_told_of_with_its_type_and_every_line_parses() -> None:
    async with desk() as d:
        await d.post("/v1/completions", **PROMPT)
        page = (await d.http.get("/metrics")).text
    types = {family.name: family.type for family in text_string_to_metric_families(page)}
    for metric in METRICS:
        assert types[metric.name.removesuffix("_total")] == metric.kind.value, metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
    assert len(types) == len(METRICS)


async def test_openmetrics_is_spoken_to_who_asks_for_it() -> None:
    async with desk() as d:
        await d.post("/v1/completions", **PROMPT)
        answer = await d.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert len(list(parse_openmetrics(answer.text))) == len(METRICS)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_tokens_are_counted_as_usage_counts_them(stream: bool) -> None:
    async with desk(says("hi there", "hello")) as d:
        if stream:
            events = await d.events("/v1/completions", **PROMPT, n=2, stream_options={"include_usage": True})
            usage = events[-2]["usage"]
        else:
            usage = (await d.post("/v1/completions", **PROMPT, n=2)).json()["usage"]
        found = await metrics(d)
    assert found["generation_tokens_total"] == usage["completion_tokens"] > 0
    assert found["prompt_tokens_total"] == usage["prompt_tokens"] > 0
    assert found['request_success_total{finished_reason="stop"}'] == 2


async def test_a_stop_string_counts_no_token_that_usage_does_not() -> None:
    async with desk(says("hi there you"), fleet=None) as d:
        d.fleet.tokens_per_step = 5
        usage = (await d.post("/v1/completions", **PROMPT, stop=["the"])).json()["usage"]
        found = await metrics(d)
    assert found["generation_tokens_total"] == usage["completion_tokens"]


async def test_the_prompt_of_an_echo_without_tokens_counts() -> None:
    async with desk() as d:
        usage = (await d.post("/v1/completions", prompt="hello", max_tokens=0, echo=True)).json()["usage"]
        found = await metrics(d)
    assert found["prompt_tokens_total"] == usage["prompt_tokens"]
    assert found['request_success_total{finished_reason="length"}'] == 1


async def test_each_token_but_the_first_has_a_latency_and_each_request_a_first_one() -> None:
    async with desk(says("hi there you")) as d:
        d.fleet.tokens_per_step = 3
        count = (await d.post("/v1/completions", **PROMPT)).json()["usage"]["completion_tokens"]
        await d.post("/v1/chat/completions", **CHAT, max_tokens=1)
        found = await metrics(d)
    assert count > 3
    assert found["inter_token_latency_seconds_count"] == count - 3  # the first three came as one
    assert found["time_to_first_token_seconds_count"] == 2
    assert found["e2e_request_latency_seconds_count"] == 2
    assert found['inter_token_latency_seconds_bucket{le="+Inf"}'] == count - 3


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_a_client_that_leaves_is_counted_once_and_nothing_stays_open(stream: bool) -> None:
    async with desk(says("hi there you all")) as d:
        d.fleet.gate.clear()
        client = RawClient(d.app, {**PROMPT, "stream": stream, "n": 3})
        serving = asyncio.create_task(client.run())
        await until(lambda: d.fleet.num_running == 3)
        assert (await metrics(d))["open_requests"] == 1
        client.leave.set()
        await serving
        found = await metrics(d)
    assert found["requests_cancelled_total"] == 1
    assert found["open_requests"] == 0
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["prompt_tokens_total"] == 0


async def test_a_deadline_that_passes_is_a_failure_and_counts_no_prompt() -> None:
    async with desk() as d:
        d.fleet.gate.clear()
        answer = await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-timeout-ms": "20"})
        assert answer.status_code == 408
        found = await metrics(d)
    assert found['requests_failed_total{code="deadline_exceeded"}'] == 1
    assert found["prompt_tokens_total"] == found["open_requests"] == 0


async def test_refusals_are_counted_by_their_codes_wherever_they_arise() -> None:
    async with desk(api_keys=("key",)) as d:
        await d.post("/v1/completions", **PROMPT)
        d.http.headers["authorization"] = "Bearer key"
        await d.post("/v1/completions", **PROMPT, temperature=-1)
        await d.post("/v1/chat/completions", **CHAT, model="other")
        d.fleet.refusal_at_submit = QueueFull("full")
        await d.post("/v1/completions", **PROMPT)
        d.fleet.refusal_at_submit = None
        d.fleet.refusal_later = DeadlineUnmeetable("too slow")
        await d.post("/v1/completions", **PROMPT)
        found = await metrics(d)
    codes = ("unauthenticated", "invalid_request", "model_not_found", "queue_full", "deadline_unmeetable")
    assert [found[f'requests_refused_total{{code="{code}"}}'] for code in codes] == [1] * len(codes)


async def test_a_failure_after_some_tokens_counts_them() -> None:
    async with desk(says("hi there you")) as d:
        d.fleet.fail_after = (2, WorkerLost("gone"))
        await d.post("/v1/completions", **PROMPT)
        found = await metrics(d)
    assert found['requests_failed_total{code="worker_lost"}'] == 1
    assert found["generation_tokens_total"] == 2


async def test_every_worker_is_told_of_under_its_own_name() -> None:
    fleet = FakeFleet(MODEL, says("x"), reports=reports())
    async with desk(fleet=fleet) as d:
        found = await metrics(d)
    assert found['num_requests_running{worker="w1"}'] == 3
    assert found['num_requests_waiting{worker="w1"}'] == 1
    assert found['num_requests_running{worker="w2"}'] == 0
    assert found['kv_cache_usage_ratio{worker="w1"}'] == 0.25
    assert [found[f'kv_cells{{state="{state}",worker="w1"}}'] for state in ("free", "owned", "cached")] == [50, 25, 25]
    assert found['decode_forwards_total{width="8",worker="w1"}'] == 2
    assert found['step_time_seconds_count{kind="decode",worker="w1"}'] == 1
    assert found['step_time_seconds_bucket{kind="decode",le="0.0025",worker="w1"}'] == 0
    assert found['step_time_seconds_bucket{kind="decode",le="0.005",worker="w1"}'] == 1
    assert found['workers{state="ready"}'] == found['workers{state="draining"}'] == 1


async def test_samples_carry_the_model_and_the_process() -> None:
    service = Service(
        FakeFleet(MODEL, says("x"), reports=reports()), TEXT, ApiSettings(), model_name="m", gateway_id="g"
    )
    transport: Any = httpx.ASGITransport(app=create_app(single(service)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        page = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {"m"}
    assert all(("gateway" in sample.labels) != ("worker" in sample.labels) for sample in samples)


async def test_metrics_need_no_key() -> None:
    async with desk(api_keys=("key",)) as d:
        assert (await d.http.get("/metrics")).status_code == 200


def test_the_page_about_metrics_tells_of_each_with_its_type_and_labels() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    told = {
        row[1].strip(" `"): (row[2].strip(), set(re.findall(r"`(\w+)`", row[3])))
        for row in rows
        if len(row) == 6 and row[1].startswith(" `")
    }
    assert told == {metric.name.removeprefix(PREFIX): (metric.kind.value, set(metric.labels)) for metric in METRICS}
