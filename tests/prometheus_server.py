"""A real Prometheus for tests, and what the dashboard of deploy/ asks one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import own_ports

DEPLOY = Path(__file__).parent.parent / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="no `prometheus` on this machine (Debian has a package)"
)


def dashboard() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return told


def panel_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """A real one, with the rules of deploy/, that scrapes `target` every half second; gives its address."""
    (port,) = own_ports(1)
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus-rules.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def ask(client: httpx.AsyncClient, query: str) -> list[float]:
    """The values that it finds now."""
    try:
        answer = await client.get("/api/v1/query", params={"query": query})
    except httpx.ConnectError:
        return []  # it is starting
    assert answer.status_code in (200, 503), f"{query}: {answer.text}"
    return [float(one["value"][1]) for one in answer.json().get("data", {}).get("result", [])]
