"""A program: deploys the application declaratively, streams from two workers, and scales down to one meanwhile.

Run as `python -m tests.scaled_service FOLDER` by a test, since Ray wants a process of its own. The last line that it
prints is JSON: how each stream ended, those that ran before and those that came after.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

from cluster.serving.front import COMMON_SETTINGS
from tests.ports import own_ports

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= COMMON_SETTINGS

import httpx
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.service_process import tiny_checkpoint
from tests.sse_events import events_of

RUNNING_TOKENS = 250


def deploy(folder: Path, num_workers: int) -> None:
    """What `serve deploy` does with a YAML."""
    args = {
        "engine": {"model": str(folder), "device": "cpu", "max_num_seqs": 4},
        "executor": "tests.served_fake:make_executor",
        "http": {"served_model_names": ["tiny"]},
    }
    application = {
        "name": "raycomb",
        "import_path": "cluster.app:build",
        "args": args,
        "deployments": [{"name": "Worker", "num_replicas": num_workers}],
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def wait_for_workers(count: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        overview = serve.status().applications.get("raycomb")
        running = overview is not None and overview.status == "RUNNING"
        if running and dict(overview.deployments["Worker"].replica_states) == {"RUNNING": count}:
            return
        time.sleep(0.2)
    raise SystemExit(f"no {count} workers: {serve.status()}")


async def stream(client: httpx.AsyncClient, max_tokens: int) -> str:
    """How the stream ended: its finish reason, or the code of its error."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    end = "nothing"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for event in events_of(response):
            end = event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"] or end
    return end


async def scale_down_while_streaming(folder: Path, port: int) -> dict[str, list[str]]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0.1)
        running = [asyncio.create_task(stream(client, RUNNING_TOKENS)) for _ in range(6)]
        await asyncio.sleep(1)
        await asyncio.to_thread(deploy, folder, 1)
        later = []
        for _ in range(10):
            await asyncio.sleep(0.2)
            later.append(await stream(client, 2))
        return {"running": await asyncio.gather(*running), "later": later}


def main() -> None:
    folder = tiny_checkpoint(Path(sys.argv[1]))
    (port,) = own_ports(1)
    ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(folder, 2)
        wait_for_workers(2)
        ends = asyncio.run(scale_down_while_streaming(folder, port))
        wait_for_workers(1)
        print(json.dumps(ends), flush=True)
        serve.delete("raycomb")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
