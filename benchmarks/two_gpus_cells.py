# mypy: allow-untyped-calls
"""A sequence's cells moved from one GPU's pool to another's: how fast by each way, and whether its answer goes on.

Used by `benchmarks.two_gpus`. Each worker is a Ray actor with a GPU of its own (`benchmarks.cell_worker`). For each way
one sequence runs at the first worker to the half of its answer, its cells move, and the second worker makes the rest;
the first one makes it too, undisturbed. One more sequence gets cells full of zeros for its tokens, which must show.
"""

from __future__ import annotations

import os
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.experimental.collective import create_collective_group

from benchmarks.cell_worker import CellWorker, ForTokens, IntoCells, Target
from benchmarks.random_model import MODELS, write_model
from benchmarks.two_gpus_plan import Note, Plan
from cluster.serving.front import free_ports
from planner.request import CellArray
from worker.config import EngineConfig

START_IN_S = 0.02
PATIENCE_S = 80.0


class Way(StrEnum):
    """BYTES: `worker.pool_port` and Ray's object store. PINNED: host memory that both have pinned. PEER: NCCL. RAY: an
    actor's tensor as an argument of the other's method, which Ray moves by NCCL."""

    BYTES = "bytes"
    PINNED = "pinned"
    PEER = "peer"
    RAY = "ray"


def cells(plan: Plan, folder: Path, note: Note) -> None:
    """`note` gets each way's bandwidth and tokens, for the fast model in its dtype and for the exact one in float32."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster for this machine alone
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    num_gpus = 2 if plan.device == "cuda" else 0
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**31)
    try:
        if num_gpus and ray.cluster_resources().get("GPU", 0) < num_gpus:
            raise RuntimeError(f"Ray sees {ray.cluster_resources().get('GPU', 0)} GPUs, and two are needed")
        for name, dtype in ((plan.fast_model, "auto"), (plan.exact_model, "float32")):
            _moves(plan, write_model(name, folder / dtype), name, dtype, _Under(f"{name}-{dtype}", note))
    finally:
        ray.shutdown()


class _Under:
    """Notes figures under one name, all of them whenever some are added."""

    def __init__(self, name: str, note: Note) -> None:
        self._name, self._note = name, note
        self._figures: dict[str, Any] = {}

    def __call__(self, **figures: Any) -> None:
        self._figures |= figures
        self._note(**{self._name: self._figures})


def _moves(plan: Plan, model: Path, name: str, dtype: str, note: Note) -> None:
    length, num_sequences = plan.moved.input_len + plan.moved.output_len, len(Way) + 1
    config = EngineConfig.model_validate({
        "model": str(model), "device": plan.device, "dtype": dtype, "load_format": "dummy", "max_num_seqs": 8,
        "max_model_len": plan.context, "max_cells": 2 * num_sequences * length, "swap_space": 0.0,
        "gpu_memory_utilization": 0.5, "num_threads": 1 if plan.device == "cpu" else None,
    })  # fmt: skip
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 1 if plan.device == "cuda" else 0,
        "enable_tensor_transport": True,
        "runtime_env": {"env_vars": {"NCCL_NVLS_ENABLE": "0"}},
    }
    remote: Any = ray.remote(**options)
    ends = [remote(CellWorker).remote(config, rank) for rank in range(2)]
    try:
        note(places=_all([end.place.remote() for end in ends]))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            mover = _Mover(ends[0], ends[1], _device_transport(plan))
            failed = mover.open(Path(shared, "cells"), length)
            ways = [way for way in Way if way not in failed]
            note(failed_ways=failed)
            for way in ways:
                note(**{f"bandwidth_{way}": _bandwidth(plan, mover, way, config)})
            note(**_answers(plan, mover, ways, MODELS[name]["vocab_size"]))
    finally:
        for end in ends:
            ray.kill(end)


class _Mover:
    """The driver's hand: moves cells between the two actors and times it."""

    def __init__(self, sender: Any, receiver: Any, transport: str) -> None:
        self.sender, self.receiver, self._transport = sender, receiver, transport

    def open(self, path: Path, num_cells: int) -> dict[str, str]:
        """Make every way ready; those that cannot be are given with the reason."""
        both = (self.sender, self.receiver)
        address = f"127.0.0.1:{free_ports(1)[0]}"
        failed: dict[str, str] = {}
        for way, make in (
            (Way.PINNED, lambda: _all([end.open_shared.remote(str(path), num_cells) for end in both])),
            (Way.PEER, lambda: _all([end.open_peers.remote(address) for end in both])),
            (Way.RAY, lambda: create_collective_group(list(both), backend=self._transport)),
        ):
            try:
                make()
            except (RayError, RuntimeError, ValueError, ImportError) as fault:
                failed[way] = f"{type(fault).__name__}: {fault}"[-600:]
        return failed

    def move(self, way: Way, source: int | CellArray, target: Target) -> float:
        """Seconds from the beginning until all are in the receiver's pool."""
        if way in (Way.BYTES, Way.RAY):
            begun = time.perf_counter()
            if way is Way.BYTES:
                moved = self.sender.send_bytes.remote(source)
                return float(_one(self.receiver.receive_bytes.remote(target, moved))) - begun
            moved = self.sender.send_tensor.options(tensor_transport=self._transport).remote(source)
            return float(_one(self.receiver.receive_tensor.remote(target, moved))) - begun
        if way is Way.PINNED:
            _one(self.sender.reset.remote())
        start_at = time.perf_counter() + START_IN_S
        sent = self.sender.send.remote(way, source, start_at)
        received = self.receiver.receive.remote(way, target, start_at)
        _, ended_at = _all([sent, received])
        return float(ended_at) - start_at


def _bandwidth(plan: Plan, mover: _Mover, way: Way, config: EngineConfig) -> dict[str, Any]:
    """As many cells as one sequence has, scattered over the pool, to as scattered ones; the first time warms up."""
    length = plan.moved.input_len + plan.moved.output_len
    assert config.max_cells is not None
    rng = np.random.default_rng(5)
    source, target = (rng.permutation(config.max_cells)[:length].astype(np.int32) for _ in range(2))
    seconds = [mover.move(way, source, IntoCells(target)) for _ in range(plan.moved.repeats + 1)][1:]
    cell_bytes = _one(mover.sender.cell_bytes.remote())
    return {
        "cells": length,
        "megabytes": round(length * cell_bytes / 1e6, 1),
        "median_ms": round(1e3 * median(seconds), 3),
        "gigabytes_per_s": round(length * cell_bytes / median(seconds) / 1e9, 2),
        "all_ms": [round(1e3 * each, 3) for each in seconds],
    }


def _answers(plan: Plan, mover: _Mover, ways: list[Way], vocab_size: int) -> dict[str, Any]:
    rng, load = np.random.default_rng(6), plan.moved
    prompts = [rng.integers(300, vocab_size, load.input_len) for _ in range(len(ways) + 1)]
    _one(mover.sender.begin.remote(prompts, load.output_len, load.output_len // 2))
    held = _one(mover.sender.so_far.remote())
    move_ms = {
        way: round(1e3 * mover.move(way, number, ForTokens(held[number][0])), 3) for number, way in enumerate(ways)
    }
    _one(mover.receiver.claim_zeroed.remote(held[-1][0]))
    right = _one(mover.sender.finish.remote())
    begun = time.perf_counter()
    answers = _one(mover.receiver.go_on.remote(prompts, [said for _, said in held], load.output_len))
    names = [*ways, "zeroed"]
    return {
        "sequence_move_ms": move_ms,
        "found_cached": _one(mover.receiver.found_cached.remote()),
        "went_on_in_s": round(time.perf_counter() - begun, 3),
        "tokens_made_after": {name: load.output_len - len(said) for name, (_, said) in zip(names, held, strict=True)},
        "same_tokens": {name: mine == theirs for name, mine, theirs in zip(names, answers, right, strict=True)},
        "same_first": {
            name: _num_alike(mine[len(said) :], theirs[len(said) :])
            for name, mine, theirs, (_, said) in zip(names, answers, right, held, strict=True)
        },
    }


def _num_alike(mine: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference."""
    return next((place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))


def _device_transport(plan: Plan) -> str:
    return "nccl" if plan.device == "cuda" else "gloo"


def _one(reference: Any) -> Any:
    return ray.get(reference, timeout=PATIENCE_S)


def _all(references: list[Any]) -> list[Any]:
    return list(ray.get(references, timeout=PATIENCE_S))
