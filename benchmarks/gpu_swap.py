"""What swap is worth on a GPU: a mixed load in a pool that is too small for it, with host memory and without.

`python -m benchmarks.gpu_swap FOLDER [--gpu-memory-utilization 0.12] [--keep]`; FOLDER has a model's config.json, and
weights are random. A third run begins with a small pool that grows under the same load.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import record
from cluster.bench.offline import OfflineBench
from cluster.offline.engine import open_offline
from worker.config import EngineConfig

CONTEXT = 2048
PREFILL_TOKENS = 8192
MIXED = (256, (100, 1000))
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": {"swap_space": 0.0},
    "swap": {"swap_space": 8.0},
    "swap, growing": {"swap_space": 8.0, "kv_initial_cells": 8192},
}


def measure(folder: Path, utilization: float, settings: dict[str, Any]) -> dict[str, float]:
    config = EngineConfig(
        model=str(folder), device="cuda", load_format="dummy", max_model_len=CONTEXT, max_num_seqs=256,
        max_prefill_tokens=PREFILL_TOKENS, max_num_batched_tokens=PREFILL_TOKENS, prefill_chunk_tokens=CONTEXT,
        prefix_caching=False, gpu_memory_utilization=utilization, **settings,
    )  # fmt: skip
    began = time.monotonic()
    with open_offline(config) as engine:
        ready_s = time.monotonic() - began
        bench = OfflineBench(engine, max_in_flight=config.max_waiting, repeats=1, seed=0)
        bench.warm_up()
        point, metrics = bench.mixed(*MIXED), engine.engine.metrics
        return {
            "ready_s": round(ready_s, 2), "cells": engine.info.num_cells, "swap_blocks": engine.info.swap_blocks,
            "seconds": round(point.seconds, 3), "output_tokens_per_s": round(point.output_tokens_per_s, 1),
            "preemptions": metrics.num_preemptions, "swapped_in": metrics.num_swapped_in,
            "cells_swapped_out": metrics.num_cells_swapped_out, "tokens_computed": metrics.num_tokens.total(),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a model's config.json; weights are random")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.12)
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    figures = {}
    for name, settings in VARIANTS.items():
        figures[name] = measure(args.folder, args.gpu_memory_utilization, settings)
        print(name, figures[name], flush=True)
    config = {
        "device": torch.cuda.get_device_name(), "model": args.folder.resolve().name, "mixed": MIXED,
        "gpu_memory_utilization": args.gpu_memory_utilization, "context": CONTEXT, "variants": VARIANTS,
    }  # fmt: skip
    record("gpu-swap", config, figures, keep=args.keep)


if __name__ == "__main__":
    main()
