"""Times captured decode steps in place of a model: random weights, full layers, shuffled cells, greedy.

A step is the row upload (device to device here) plus one graph replay: embedding, all layers, LM head, arg max, and the
feedback of tokens, lengths and cells. Steps are queued ahead of the device, so host time is not in `step_ms`; `loop_ms`
is a host loop that uploads, replays and fetches tokens one step behind, as an engine does. The floor is the bytes of
weights and of keys and values over a measured read rate.

    python -m benchmarks.decode_step --shape llama-8b --widths 1 8 64 --output result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import get_args

import torch
import triton

from tests.decode_reference import random_weights, rotary_tables
from tests.decode_rig import quantized
from worker.cell_rows import SCALED, packed_rows
from worker.config import Quantization
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_chain import DecodeChain
from worker.cuda.decode_plan import DecodePlan, plan_decode, split_plan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.decode_state import DecodeState, PendingTokens
from worker.cuda.graphs import DecodeGraphs, Draw
from worker.cuda.vendor_products import vendor_products
from worker.kv_pool import KvPool, bytes_per_cell

READ_BYTES_PER_S = 4.38e12
STEPS = 24
SHAPES = {
    "llama-8b": DecodeShape(
        hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256,
        context=8192, norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,) * 32,
    ),
    "qwen3-0.6b": DecodeShape(
        hidden=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936,
        context=8192, norm_eps=1e-6, dtype=torch.bfloat16, windows=(None,) * 28, qk_norm=True,
    ),
}  # fmt: skip


class Bench:
    """One model's weights, pool and state; times any plan of any width up to `max_width`, for rows of any lengths that
    together fit into `num_cells` shuffled cells (with 2 STEPS more a row)."""

    def __init__(
        self, shape: DecodeShape, max_width: int, num_cells: int, cell_dtype: torch.dtype | None = None
    ) -> None:
        device = torch.device("cuda")
        self.shape, self.device = shape, device
        self.weights = quantized(random_weights(shape, device), shape.quantization)
        self.rotary = rotary_tables(shape, device)
        self.vendor = vendor_products(device)
        num_cells = max(num_cells, 8192)
        heads, self.cell_dtype = (shape.num_kv_heads, shape.head_dim), cell_dtype or shape.dtype
        cells = KvPool(shape.num_layers, num_cells, *heads, self.cell_dtype, device)
        for plane in (layer for planes in (cells.keys, cells.values) for layer in planes):
            if self.cell_dtype == SCALED:
                plane[:, 0] = packed_rows(torch.randn(1, *heads, device=device))
            else:
                plane.normal_()
        self.pool = [cells.layer(index) for index in range(shape.num_layers)]
        self.state = DecodeState(
            num_slots=max_width, max_rows=max_width, context=shape.context, scratch_cell=num_cells, device=device
        )
        self.shuffled = torch.randperm(num_cells, device=device).int()
        self.starts = torch.zeros(max_width + 1, dtype=torch.int32, device=device)
        self.rows: list[torch.Tensor] = []  # step by step: the rows' slots and their new cells
        self.host_cells: list[list[int]] = []

    def place(self, contexts: Sequence[int]) -> None:
        """Row i lives in slot i; its timed steps are around contexts[i]."""
        starts = [max(0, context - STEPS // 2) for context in contexts]
        self.starts[: len(starts)] = torch.tensor(starts, dtype=torch.int32, device=self.device)
        at, new_cells = 0, []
        for slot, start in enumerate(starts):
            own = self.shuffled[at : at + start + 2 * STEPS]
            self.state.table[slot, : len(own)] = own
            new_cells.append(own[start : start + STEPS])
            at += len(own)
        slots = torch.arange(len(starts), dtype=torch.int32, device=self.device)
        self.rows = [torch.stack([slots, cells]) for cells in torch.stack(new_cells, dim=1)]
        self.host_cells = [rows[1].tolist() for rows in self.rows]

    def rewind(self) -> None:
        self.state.length[:-1] = self.starts[:-1]
        self.state.last_token.random_(0, self.shape.vocab_size)

    def graphs(self, width: int, plan: DecodePlan) -> DecodeGraphs:
        buffers = DecodeBuffers(self.shape, width, [plan], self.device)
        chain = DecodeChain(self.shape, self.weights, self.rotary, self.pool, self.state, buffers, self.vendor)
        chain.prepare({width: plan})
        self.rewind()
        self.state.set_rows([], [])
        return DecodeGraphs(lambda w, _: chain.run(w, plan), [width], [Draw.GREEDY])

    def step_ms(self, graphs: DecodeGraphs, rounds: int = 4) -> float:
        """Median time of one step of the placed rows on the device, with the steps queued ahead of it."""
        width = self.rows[0].shape[1]
        times: list[float] = []
        for _ in range(rounds):
            self.rewind()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]  # type: ignore[no-untyped-call]
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            for step in range(STEPS):
                marks[step].record()
                self.state.row_slots[:width].copy_(self.rows[step][0, :width])
                self.state.new_cells[:width].copy_(self.rows[step][1, :width])
                graphs.replay(graphs.width_for(width), Draw.GREEDY)
            marks[STEPS].record()
            torch.cuda.synchronize()
            times += [before.elapsed_time(after) for before, after in pairwise(marks)]
        return statistics.median(times)

    def loop_ms(self, graphs: DecodeGraphs, rounds: int = 3) -> float:
        """Wall time of one step of a host loop whose tokens come back one step behind."""
        width = self.rows[0].shape[1]
        slots, times = list(range(width)), []
        for _ in range(rounds):
            self.rewind()
            torch.cuda.synchronize()
            began = time.perf_counter()
            pending: PendingTokens | None = None
            for step in range(STEPS):
                self.state.set_rows(slots, self.host_cells[step])
                graphs.replay(graphs.width_for(width), Draw.GREEDY)
                behind, pending = pending, self.state.fetch_tokens(width)
                if behind is not None:
                    behind.wait()
            assert pending is not None
            pending.wait()
            times.append((time.perf_counter() - began) / STEPS * 1e3)
        return statistics.median(times)

    def floor_ms(self, contexts: Sequence[int]) -> float:
        s = self.shape
        cell_bytes = bytes_per_cell(s.num_layers, s.num_kv_heads, s.head_dim, self.cell_dtype)
        return (self.weights.bytes_read + sum(contexts) * cell_bytes) / READ_BYTES_PER_S * 1e3


def asking_ahead(plan: DecodePlan, ahead: int) -> DecodePlan:
    """The same, with products of layers that ask for so many numbers of each column while they wait."""
    if plan.linear is None:
        return plan
    tiles = {name: replace(getattr(plan.linear, name), ahead=ahead) for name in ("qkv", "o", "gate_up", "down")}
    return replace(plan, linear=replace(plan.linear, **tiles))


def warm_clocks(seconds: float = 1.0) -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--split", action="store_true", help="own products where the vendor's library is the plan, too")
    parser.add_argument("--ahead", type=int, help="numbers of each column that products ask for while they wait")
    parser.add_argument("--layers", type=int, help="run fewer layers than the model has")
    parser.add_argument(
        "--quantization", choices=get_args(Quantization), default="none", help="of the layers' matrices"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'shape':12} {'width':>5} {'chain':>8} {'step ms':>8} {'loop ms':>8} {'floor':>7} {'floor/step':>10}")
    for name in args.shape or SHAPES:
        shape = replace(SHAPES[name], quantization=args.quantization)
        if args.layers is not None:
            shape = replace(shape, windows=shape.windows[: args.layers])
        bench = Bench(shape, max(args.widths), max(args.widths) * (args.context + 2 * STEPS))
        warm_clocks()
        for width in args.widths:
            plan = plan_decode(shape, width, hopper=torch.cuda.get_device_capability() >= (9, 0))
            if args.split and (split := split_plan(shape, width)) is not None:
                plan = split
            if args.ahead is not None:
                plan = asking_ahead(plan, args.ahead)
            contexts = [args.context] * width
            bench.place(contexts)
            graphs = bench.graphs(width, plan)
            step, loop, floor = bench.step_ms(graphs), bench.loop_ms(graphs), bench.floor_ms(contexts)
            chain = plan.chain.value
            print(
                f"{name:12} {width:5} {chain:>8} {step:8.3f} {loop:8.3f} {floor:7.3f} {floor / step:10.0%}", flush=True
            )
            rows.append(
                {"shape": name, "width": width, "chain": chain, "context": args.context, "step_ms": round(step, 4),
                 "loop_ms": round(loop, 4), "floor_ms": round(floor, 4), "plan": repr(plan)}
            )  # fmt: skip
        del bench
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "benchmark": "decode_step",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "quantization": args.quantization,
        "read_bytes_per_s": READ_BYTES_PER_S,
        "steps": STEPS,
        "rows": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "rows": [{k: v for k, v in row.items() if k != "plan"} for row in rows]}))


if __name__ == "__main__":
    main()
