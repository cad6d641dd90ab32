"""What deploy/ has for Prometheus and Grafana: names exist, files are valid, a real Prometheus answers every query."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.telemetry.metric import Kind
from cluster.telemetry.service_metrics import METRICS
from planner.errors import QueueFull, WorkerLost
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports
from tests.http_desk import MODEL, PROMPT, RawClient, desk, says, until
from tests.listening import listening
from tests.prometheus_server import DEPLOY, PROMTOOL, ask, dashboard, needs_prometheus, panel_queries, prometheus

SILENT_HERE = ("raycomb_failovers_total", "raycomb_workers_lost_total")
"""Counters that stay at zero in this test, and are told of all the same."""


def rule_queries() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def page_queries() -> list[str]:
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    return re.findall(r"\| `((?:sum|histogram)[^|]*)`", page)


def names_of(metric: Any) -> set[str]:
    parts = ("_bucket", "_count", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)
    return {metric.name + part for part in parts}


def test_every_name_in_a_query_is_that_of_a_metric() -> None:
    known = set().union(*map(names_of, METRICS))
    queries = panel_queries() + rule_queries() + page_queries()
    assert len(queries) > 30
    for query in queries:
        asked = set(re.findall(r"raycomb_\w+", query))
        assert asked, query
        assert asked <= known, query


def test_every_metric_is_on_the_dashboard_or_named_here_as_left_out() -> None:
    asked = set(re.findall(r"raycomb_\w+", " ".join(panel_queries())))
    missing = {metric.name for metric in METRICS if not names_of(metric) & asked}
    assert missing == {
        "raycomb_queued_prefill_tokens",
        "raycomb_prefilled_tokens_total",
        "raycomb_sampled_tokens_total",
        "raycomb_forced_tokens_total",
        "raycomb_prefill_forwards_total",
        "raycomb_sequences_finished_total",
        "raycomb_data_plane_refusals_total",
        "raycomb_prefix_cache_found_tokens_total",
    }


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@needs_prometheus
@pytest.mark.parametrize("kind", ["config", "rules"])
async def test_the_files_are_valid(kind: str) -> None:
    file = {"config": "prometheus.yml", "rules": "prometheus-rules.yml"}[kind]
    checking = await asyncio.create_subprocess_exec(str(PROMTOOL), "check", kind, str(DEPLOY / file))
    assert await checking.wait() == 0


async def traffic(d: Any) -> None:
    """Requests that end in every way."""
    for _ in range(3):
        await d.post("/v1/completions", **PROMPT)
        await d.post("/v1/completions", **PROMPT, temperature=-1)
        d.fleet.refusal_at_submit = QueueFull("full")
        await d.post("/v1/completions", **PROMPT)
        d.fleet.refusal_at_submit = None
        d.fleet.fail_after = (1, WorkerLost("gone"))
        await d.post("/v1/completions", **PROMPT)
        d.fleet.fail_after = None
        d.fleet.gate.clear()
        client = RawClient(d.app, dict(PROMPT))
        serving = asyncio.create_task(client.run())
        await until(lambda: d.fleet.num_running == 1)
        client.leave.set()
        await serving
        d.fleet.gate.set()
        await asyncio.sleep(0.6)


@needs_prometheus
async def test_a_real_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    fleet = FakeFleet(MODEL, says("hi there you"), reports=reports())
    async with (
        desk(fleet=fleet) as d,
        listening(d.app) as url,
        prometheus(tmp_path, url.removeprefix("http://").rstrip("/")) as server,
        httpx.AsyncClient(base_url=server, trust_env=False) as client,
    ):
        await traffic(d)
        deadline = asyncio.get_running_loop().time() + 20
        queries = [query.replace("$__rate_interval", "30s").replace("$model", ".*") for query in panel_queries()]
        missing = list(queries)
        while missing and asyncio.get_running_loop().time() < deadline:
            answers = [await ask(client, query) for query in missing]
            missing = [query for query, found in zip(missing, answers, strict=True) if not found]
            await asyncio.sleep(0.5)
        assert missing == []
        for query in rule_queries() + page_queries():
            await ask(client, query)  # it may find nothing, and must be understood
        assert await ask(client, 'sum(raycomb_kv_cells{worker="w1"})') == [100.0]
