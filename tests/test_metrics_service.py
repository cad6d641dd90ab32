"""A running service is scraped at both places: its gateway's `/metrics`, and Ray's agent of its node."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry.gateway_metrics import GENERATION_TOKENS
from cluster.telemetry.metric import Kind, Metric
from cluster.telemetry.service_metrics import METRICS
from tests.service_process import ServiceProcess
from tests.service_state import ServiceState

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(240)]

Families = dict[str, Any]
AGENT_S = 40.0
"""Ray's processes report to their agent every 10 s."""


async def families_at(client: httpx.AsyncClient, url: str) -> Families:
    answer = await client.get(url)
    assert answer.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def name_of(metric: Metric) -> str:
    """As the parser has it."""
    return metric.name.removesuffix("_total")


def total(families: Families, metric: Metric, prefix: str = "") -> float:
    """Of a counter, over all its labels."""
    family = families.get(prefix + name_of(metric))
    return 0.0 if family is None else sum(sample.value for sample in family.samples)


async def test_both_scrapes_tell_every_metric_and_agree_on_tokens(
    smollm2_service: ServiceProcess, smollm2_state: ServiceState, api_key: str
) -> None:
    (agent,) = (await asyncio.to_thread(smollm2_state.ask))["agents"]
    async with httpx.AsyncClient(base_url=smollm2_service.url, timeout=60, trust_env=False) as client:
        before = await families_at(client, "/metrics")
        body = {"model": "smollm2-135m", "prompt": "1, 2, 3,", "max_tokens": 6, "n": 2, "ignore_eos": True}
        headers = {"authorization": f"Bearer {api_key}"}
        answers = [await client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
        num_tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        families = await families_at(client, "/metrics")
        assert {name: family.type for name, family in families.items()} == {
            name_of(metric): metric.kind.value for metric in METRICS
        }
        assert total(families, GENERATION_TOKENS) - total(before, GENERATION_TOKENS) == num_tokens == 24

        deadline = time.monotonic() + AGENT_S
        while True:
            told = await families_at(client, agent["url"])
            if total(told, GENERATION_TOKENS, "ray_") == total(families, GENERATION_TOKENS):
                break
            assert time.monotonic() < deadline, "Ray's agent never agreed"
            await asyncio.sleep(1)
    for metric in METRICS:
        counted = metric.kind is Kind.GAUGE or any(sample.value for sample in families[name_of(metric)].samples)
        if counted:  # Ray knows a counter or histogram from its first count on
            assert told["ray_" + name_of(metric)].type == metric.kind.value, metric.name
