# mypy: allow-untyped-calls
"""How fast the GPU kernels around decode are: cell copies, the sampler, prefill attention; each beside its ceiling.

`python -m benchmarks.kernels [--keep]` on a machine with a GPU. Times are medians of captured replays by CUDA events;
inputs rotate where one would stay in the cache that the real thing finds cold.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.record import record
from planner.limits import SWAP_BLOCK_CELLS
from planner.step import SwapIn, SwapOut
from worker.attention import Span
from worker.cuda.prefill_attention import attend
from worker.cuda.prefill_plan import plan_prefill
from worker.cuda.sampler import GpuSampler
from worker.cuda.swap import PinnedSwap
from worker.cuda.write_cells import rotate_and_write
from worker.kernels import CellCopier

DEVICE = torch.device("cuda")
VOCAB_SIZE = 128_256
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 32
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `rate` is in `unit`; `against` is what the ceiling or the rival did, in the same unit."""

    name: str
    microseconds: float
    rate: float = 0.0
    unit: str = ""
    against: float = 0.0


def captured_us(run: Callable[[], object], calls: int = 1) -> float:
    """Median microseconds of one call of `run`, which makes `calls` calls when run once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return float(statistics.median(times[3:])) / calls


def copies() -> list[Row]:
    """Random cells of an 8B shape: 32 layers, K and V, 2 KB rows. Rates are bytes read plus written."""
    planes = [torch.randn(16_384, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2 * LAYERS)]
    copier = CellCopier(planes)
    order = torch.randperm(16_384, device=DEVICE).int()
    cells, others = order[:4096].contiguous(), order[4096:8192].contiguous()
    packed, target = copier.buffer(4096), copier.buffer(4096).storage
    size = packed.storage.numel()
    device_copy = captured_us(lambda: target.copy_(packed.storage))
    ceiling = 2 * size / device_copy / 1e6
    rows = [Row("device-to-device copy", device_copy, ceiling, "TB/s")]
    runs: dict[str, Callable[[], None]] = {
        "gather 4,096 cells": lambda: copier.gather(cells, packed),
        "scatter 4,096 cells": lambda: copier.scatter(packed, cells),
        "copy 4,096 cells": lambda: copier.copy(cells, others),
    }
    for name, run in runs.items():
        us = captured_us(run)
        rows.append(Row(name, us, 2 * size / us / 1e6, "TB/s", ceiling))
    few = cells[:64].contiguous()
    us = captured_us(lambda: copier.gather(few, packed))
    rows.append(Row("gather 64 cells", us, 2 * size / 64 / us / 1e6, "TB/s", ceiling))
    return rows + swaps(copier, cells)


def swaps(copier: CellCopier, cells: Tensor) -> list[Row]:
    """To pinned host memory and back, block by block; rates are bytes over the bus."""
    size = len(cells) * copier.num_planes * copier.row_bytes
    host, device = torch.empty(size, dtype=torch.uint8, pin_memory=True), copier.buffer(len(cells)).storage
    ceiling = size / _eager_us(lambda: host.copy_(device, non_blocking=True)) / 1e3
    blocks = np.arange(len(cells) // SWAP_BLOCK_CELLS, dtype=np.int32)
    space = PinnedSwap(copier, len(blocks), SWAP_BLOCK_CELLS)
    out, back = SwapOut(cells.cpu().numpy(), blocks), SwapIn(1, blocks, cells.cpu().numpy())

    def copy_out() -> None:
        space.copy_out(out)
        space.join()

    out_us = _eager_us(copy_out)
    back_us = _eager_us(lambda: space.copy_in(back))
    thousand = SwapOut(out.cells[:1024], blocks[: 1024 // SWAP_BLOCK_CELLS])
    matrix = torch.randn(8192, 8192, device=DEVICE).bfloat16()

    def products() -> None:
        for _ in range(12):
            torch.mm(matrix, matrix)

    def swap_and_products() -> None:
        space.copy_out(thousand)
        products()

    # In turns, since the chip's clock falls in the first seconds of such work.
    turns = [(_eager_us(products), _eager_us(swap_and_products)) for _ in range(12)]
    alone_us, beside_us = (float(statistics.median(times[4:])) for times in zip(*turns, strict=True))
    space.join()
    return [
        Row("swap out 4,096 cells", out_us, size / out_us / 1e3, "GB/s", ceiling),
        Row("swap back 4,096 cells", back_us, size / back_us / 1e3, "GB/s", ceiling),
        Row("12 products of 8,192 x 8,192 alone", alone_us),
        Row("the same behind a swap out of 1,024 cells", beside_us, alone_us / beside_us, "of alone"),
    ]


def _eager_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return float(statistics.median(times[1:]))


@dataclass(frozen=True, slots=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SETTINGS = {
    "greedy": Settings(temperature=0.0),
    "temperature": Settings(),
    "top-k 50": Settings(top_k=50),
    "top-p 0.9": Settings(top_p=0.9),
    "top-k 50, top-p 0.9": Settings(top_k=50, top_p=0.9),
    "min-p 0.05": Settings(min_p=0.05),
}


def sampling() -> list[Row]:
    """bfloat16 logits, 128,256 wide. flat: normal, deviation 2.5; peaked: a Zipf law of exponent 1.5, shuffled."""
    rows = []
    for kind in ("flat", "peaked"):
        for num_rows in (1, 64, 256):
            # Rotating sets exceed the second-level cache; a single row is there in real use too.
            sets = [_logits(kind, num_rows) for _ in range(4 if num_rows > 1 else 1)]
            for name, settings in SETTINGS.items():
                us = _sample_us(sets, settings)
                rows.append(Row(f"sample {kind}, {num_rows} rows, {name}", us, sets[0].nbytes / us / 1e6, "TB/s"))
            if kind == "flat":
                us = captured_us(lambda: [x.argmax(-1) for x in sets], len(sets))  # noqa: B023
                rows.append(Row(f"torch.argmax, {num_rows} rows", us, sets[0].nbytes / us / 1e6, "TB/s"))
    return rows


def _logits(kind: str, num_rows: int) -> Tensor:
    if kind == "flat":
        return (2.5 * torch.randn(num_rows, VOCAB_SIZE, device=DEVICE)).bfloat16()
    order = torch.rand(num_rows, VOCAB_SIZE, device=DEVICE).argsort(dim=-1)
    return (10 - 1.5 * (order + 1).float().log()).bfloat16()


def _sample_us(sets: list[Tensor], settings: Settings) -> float:
    num_rows = len(sets[0])
    sampler = GpuSampler(num_rows, VOCAB_SIZE, DEVICE)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    ints = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    tables = (
        torch.full((num_rows,), settings.temperature, device=DEVICE),
        ints + settings.top_k,
        torch.full((num_rows,), settings.top_p, device=DEVICE),
        torch.full((num_rows,), settings.min_p, device=DEVICE),
        torch.arange(num_rows, device=DEVICE),
        ints + 300,
    )
    tokens, bad = ints.clone(), ints.clone()

    def run() -> None:
        for logits in sets:
            sampler.sample(logits, slots, *tables, tokens, bad)

    return captured_us(run, len(sets))


def prefills() -> list[Row]:
    """One layer of an 8B shape in bfloat16, shuffled cells. Rates count the multiplications that causality leaves."""
    rows = []
    cases = {
        "4 x 2,048": [(0, 2048)] * 4,
        "8 x 256": [(0, 256)] * 8,
        "512 behind 7,680": [(7680, 512)],
        "1 x 32,768": [(0, 32_768)],
        "128 decodes at 300 and 384 of a prompt": [(300, 1)] * 128 + [(0, 384)],
    }
    for name, chunks in cases.items():
        us, flop = _prefill_us(chunks)
        rival = 0.0
        if len(set(chunks)) == 1 and chunks[0][0] == 0:
            rival = flop / _flash_us(len(chunks), chunks[0][1]) / 1e6
        rows.append(Row(f"prefill {name}", us, flop / us / 1e6, "TFLOP/s", rival))
    return [*rows, _write_row()]


def _spans(chunks: list[tuple[int, int]]) -> tuple[list[Span], int]:
    num_cells = sum(start + length for start, length in chunks)
    order = np.random.default_rng(0).permutation(num_cells).astype(np.int32)
    spans, row, taken = [], 0, 0
    for start, length in chunks:
        spans.append(Span(row, start, length, order[taken : taken + start + length]))
        row, taken = row + length, taken + start + length
    return spans, num_cells


def _prefill_us(chunks: list[tuple[int, int]]) -> tuple[float, float]:
    spans, num_cells = _spans(chunks)
    plan = plan_prefill(spans, HEADS // KV_HEADS, DEVICE)
    keys, values = (torch.randn(num_cells, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2))
    query = torch.randn(plan.num_tokens, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    out = torch.empty_like(query)
    flop = sum(4 * HEADS * HEAD_DIM * (s * n + n * (n + 1) / 2) for s, n in chunks)
    return captured_us(lambda: attend(query, keys, values, plan, out)), flop


def _flash_us(batch: int, length: int) -> float:
    """torch's FlashAttention-2, dense tensors, no cells."""
    query = torch.randn(batch, HEADS, length, HEAD_DIM, device=DEVICE).bfloat16()
    key, value = (torch.randn(batch, KV_HEADS, length, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2))

    def run() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return captured_us(run)


def _write_row() -> Row:
    spans, num_cells = _spans([(0, 2048)] * 4)
    plan = plan_prefill(spans, HEADS // KV_HEADS, DEVICE)
    qkv = torch.randn(plan.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE).bfloat16()
    keys, values = (torch.empty(num_cells, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2))
    query = torch.empty(plan.num_tokens, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    angles = torch.rand(2048, HEAD_DIM // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    us = captured_us(
        lambda: rotate_and_write(qkv, plan.positions, plan.new_cells, cos, sin, keys, values, query, eps=1e-5)
    )
    return Row("rotate and write 8,192 tokens", us, 2 * qkv.nbytes / us / 1e6, "TB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="also write a dated file to benchmarks/results")
    keep = parser.parse_args().keep
    torch.manual_seed(0)
    rows: list[Row] = []
    for section in (copies, sampling, prefills):
        for row in section():
            against = f"   against {row.against:8.2f}" if row.against else ""
            print(f"{row.name:55s} {row.microseconds:10.1f} us {row.rate:9.2f} {row.unit}{against}", flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
    figures = {
        row.name: {"us": round(row.microseconds, 2), row.unit: round(row.rate, 3), "against": round(row.against, 3)}
        for row in rows
    }
    config = {
        "device": torch.cuda.get_device_name(),
        "triton": version("triton"),
        "numba_cuda": version("numba-cuda"),
        "cuda": torch.version.cuda,
        "vocab_size": VOCAB_SIZE,
        "replays": REPLAYS,
        "seed": 0,
    }
    record("kernels", config, figures, keep=keep)


if __name__ == "__main__":
    main()
