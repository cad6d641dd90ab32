"""An actor with one GPU, one pool and one planner: a worker's engine taken by hand, so that its cells can be moved.

Used by `benchmarks.two_gpus_cells`. Steps run one by one, when the caller says so; that is all that differs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cell_ways import CellWay, Peers, SharedHostMemory
from planner.request import CellArray, Request, SamplingParams, TokenArray
from tests.turns import Turns
from worker.cell_image import CellImage
from worker.config import EngineConfig
from worker.executor import limits_for
from worker.pool_port import PoolPort
from worker.program import build_executor

_GROUP_WITHIN = timedelta(seconds=20)

Source = int | CellArray
"""A sequence by its number, or these cells."""


@dataclass(frozen=True, slots=True)
class ForTokens:
    """Cells that the planner gives to these tokens, which are then resident."""

    tokens: TokenArray


@dataclass(frozen=True, slots=True)
class IntoCells:
    """These cells, whoever they belong to."""

    cells: CellArray


Target = ForTokens | IntoCells


class CellWorker:
    """Owner: Ray; one call at a time. Sequences go by the number in which `begin` was given their prompts."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        executor = build_executor(config)
        self._info = executor.info
        self._device = torch.device(self._info.device)
        self._turns = Turns(limits_for(config, self._info), executor, checked=False)
        self._planner = self._turns.planner
        port = getattr(executor, "port", None)
        assert isinstance(port, PoolPort), "an executor over a pool has a port"
        self._port = port
        self._rank = rank
        self._ways: dict[str, CellWay] = {}
        self._ids: list[int] = []
        self._said: list[list[int]] = []
        self._prompts: Sequence[TokenArray] = ()
        self._ended: set[int] = set()

    def place(self) -> dict[str, Any]:
        """Which device this process sees, and that it sees one alone."""
        if self._device.type != "cuda":
            return {"device": "cpu", "layout": str(self._port.layout)}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "uuid": str(properties.uuid),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "num_visible": torch.cuda.device_count(),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
        }

    def cell_bytes(self) -> int:
        return self._port.layout.cell_bytes

    def open_shared(self, path: str, num_cells: int) -> None:
        num_bytes = num_cells * self._port.layout.cell_bytes
        self._ways["pinned"] = SharedHostMemory(
            Path(path), num_bytes, self._port.mover, self._port.layout, self._device
        )

    def open_peers(self, address: str) -> None:
        """Both ends at once: they wait for each other."""
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            f"tcp://{address}",
            _GROUP_WITHIN,
            world_size=2,
            rank=self._rank,
            device_id=torch.device("cuda:0") if on_gpu else None,  # connected now, so a fault shows now
        )
        self._ways["peer"] = Peers(1 - self._rank, self._port.mover, self._port.layout, self._device)

    def reset(self) -> None:
        """Between two transfers through shared memory, at the sender."""
        shared = self._ways["pinned"]
        assert isinstance(shared, SharedHostMemory)
        shared.reset()

    def begin(self, prompts: Sequence[TokenArray], num_tokens: int, num_first: int) -> None:
        """Have all sequences say `num_first` of `num_tokens` tokens, greedily."""
        self._prompts = prompts
        self._said = [[] for _ in prompts]
        self._ids = [self._planner.submit(_request(prompt, num_tokens)) for prompt in prompts]
        while min(map(len, self._said)) < num_first:
            self._turn()

    def so_far(self) -> list[tuple[TokenArray, list[int]]]:
        """Of each sequence the tokens that its cells hold, and what it has said."""
        return [(self._held(number).copy(), list(said)) for number, said in enumerate(self._said)]

    def finish(self) -> list[list[int]]:
        """Undisturbed to the end; all that each has said."""
        while len(self._ended) < len(self._ids):
            self._turn()
        return self._said

    def go_on(self, prompts: Sequence[TokenArray], said: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """All that each has said, where the rest is made here, together."""
        self._prompts, self._said, self._ended = prompts, [list(each) for each in said], set()
        self._ids = [
            self._planner.submit(_request(np.array([*prompt, *each]), num_tokens - len(each), num_generated=len(each)))
            for prompt, each in zip(prompts, said, strict=True)
        ]
        return self.finish()

    def found_cached(self) -> int:
        """Prompt tokens that were found resident, ever."""
        return self._planner.metrics.num_prefix_hits

    def send(self, way: str, source: Source, start_at: float) -> float:
        """The time at which all had left. Not before `start_at`."""
        cells = self._cells(source)
        time.sleep(max(0.0, start_at - time.perf_counter()))
        self._ways[way].send(cells)
        return time.perf_counter()

    def receive(self, way: str, target: Target, start_at: float) -> float:
        """The time at which all were there."""
        time.sleep(max(0.0, start_at - time.perf_counter()))
        self._fill(target, self._ways[way].receive)
        return time.perf_counter()

    def send_bytes(self, source: Source) -> CellImage:
        return self._port.export(self._cells(source))

    def receive_bytes(self, target: Target, image: CellImage) -> float:
        self._fill(target, lambda cells: self._port.fill(cells, image))
        return time.perf_counter()

    def send_tensor(self, source: Source) -> Tensor:
        """uint8[2 * num_layers, n, row bytes] on the device; Ray takes it from there."""
        return self._port.mover.read(self._cells(source))

    def receive_tensor(self, target: Target, rows: Tensor) -> float:
        self._fill(target, lambda cells: self._port.mover.write(cells, rows))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def claim_zeroed(self, tokens: TokenArray) -> None:
        """Let the tokens count as resident with zeros in their cells: what must show as other tokens."""
        rows = torch.zeros(len(tokens) * self.cell_bytes(), dtype=torch.uint8)
        self.receive_tensor(ForTokens(tokens), rows.view(2 * self._info.num_layers, len(tokens), -1))

    def _turn(self) -> None:
        assert self._planner.has_work, "nothing runs"
        for update in self._turns.turn():
            assert update.error is None, update.error
            number = self._ids.index(update.request_id)
            self._said[number] += update.tokens
            if update.finish_reason is not None:
                self._ended.add(number)

    def _held(self, number: int) -> TokenArray:
        held = self._planner.held(self._ids[number])
        assert held is not None, "the sequence does not run"
        return held.tokens

    def _cells(self, source: Source) -> CellArray:
        if not isinstance(source, int):
            return source
        held = self._planner.held(self._ids[source])
        assert held is not None, "the sequence does not run"
        return held.cells.copy()

    def _fill(self, target: Target, fill: Callable[[CellArray], None]) -> None:
        match target:
            case IntoCells(cells):
                fill(cells)
            case ForTokens(tokens):
                num_new = self._planner.receive(tokens, lambda _, cells: fill(cells))
                assert num_new == len(tokens), "the pool has no room, or held some of it already"


def _request(prompt: TokenArray, max_tokens: int, **fields: Any) -> Request:
    return Request(prompt, max_tokens, SamplingParams(temperature=0.0), **fields)
