"""The service that `benchmarks.two_gpus` measures: a real one, with random weights and settings fit for the plan."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import psutil

from benchmarks.two_gpus_plan import MODEL_NAME, NUM_WORKERS, Plan
from cluster.bench.online import Server
from cluster.bench.sse_client import Target
from tests.service_process import ServiceProcess

KINDS = {
    "workers": "ServeReplica:raycomb:Worker",
    "gateways": "ServeReplica:raycomb:Gateway",
    "haproxy": "haproxy -",
    "ray": "ray",  # whatever of it is none of the above
}
"""Parts of the titles of the service's processes."""

DRAIN_S = 5.0


def settings_of(plan: Plan, model: Path, secret: str, num_workers: int = NUM_WORKERS, **engine: Any) -> dict[str, Any]:
    """Settings of `cluster.config.ServiceConfig`; `engine` are more of `worker.config.EngineConfig`."""
    made: dict[str, Any] = {
        "model": str(model),
        "device": plan.device,
        "load_format": "dummy",
        "max_model_len": plan.context,
        "max_num_seqs": plan.max_num_seqs,
        "max_prefill_tokens": plan.step_tokens,
        "max_num_batched_tokens": plan.step_tokens,
        "prefill_chunk_tokens": min(2048, plan.step_tokens),
        "swap_space": 0.0,
    }
    made |= {"num_threads": 1, "max_cells": 8192} if plan.device == "cpu" else {}
    return {
        "engine": made | engine,
        "http": {"served_model_names": [MODEL_NAME]},
        "num_workers": num_workers,
        "num_gateways": plan.num_gateways,
        "data_plane_host": "127.0.0.1",
        "secret": secret,
        "drain_timeout_s": DRAIN_S,
    }


def server_of(service: ServiceProcess) -> Server:
    return Server(Target.parse(service.url), MODEL_NAME)


class ProcessorUse:
    """Seconds of processor time of each process of a service from now on."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._before = self._now()

    def seconds(self) -> dict[str, list[float]]:
        """Of each kind, one entry a process that was there from the beginning, the busiest first."""
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        now = self._now()
        for pid, (kind, used) in now.items():
            if pid in self._before:
                found[kind].append(used - self._before[pid][1])
        return {kind: sorted(used, reverse=True) for kind, used in found.items()}

    def _now(self) -> dict[int, tuple[str, float]]:
        used = {}
        for process in self._service.processes():
            try:
                title, times = " ".join(process.cmdline()), process.cpu_times()
            except psutil.Error:
                continue
            kind = next((kind for kind, part in KINDS.items() if part in title), "ray")
            used[process.pid] = kind, times.user + times.system
        return used


def gpus_of_workers(service: ServiceProcess) -> list[str]:
    """The GPU on which each worker's process computes, by the driver's word; nothing where there is no driver."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        lines = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    by_pid = dict(line.split(", ", 1) for line in lines if ", " in line)
    pids = [str(process.pid) for process in service.processes(KINDS["workers"])]
    return [by_pid[pid] for pid in pids if pid in by_pid]
