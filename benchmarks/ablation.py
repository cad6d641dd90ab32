"""What each of the GPU worker's optimisations is worth: the same loads with one of them off at a time.

Every variant is an engine of its own, through the whole of planner, executor and draws, on random weights. `base` has
everything on. A variant takes something away where it is put together, so nothing in the worker knows of it:

* `eager`: decode steps are launched kernel by kernel instead of replayed.
* `eager prefills`: so are prefills of few tokens.
* `one step`: a step is planned when the tokens of the one before are on the host.
* `library`: the vendor's matrix products and separate kernels around them, instead of chains made for each width.
* `one program a row`: attention of wide steps does not cut long rows into pieces.
* `widest`: every decode step runs at the widest captured width.
* `host draws`: tokens are drawn by the reference sampler in torch, from the logits of the same graph.
* `random`: not off, but on: temperature 1 instead of greedy.

    python -m benchmarks.ablation FOLDER --batch-sizes 1 64 256
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.record import record
from cluster.bench.offline import GREEDY, OfflineBench
from cluster.offline.engine import open_offline
from planner.request import Request, SamplingParams
from planner.step import Step, StepResult
from worker.adapters import AdapterSlots
from worker.config import EngineConfig
from worker.cuda.decode import Capture, CudaDecode, Plan, Steps
from worker.cuda.decode_plan import AttentionTile, DecodePlan, plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.executor import CudaExecutor
from worker.cuda.graphs import DecodeGraphs, Draw, LaunchedSteps
from worker.cuda.memory import captured_prefills
from worker.cuda.prefill import PrefillChain
from worker.cuda.warm_up import warm_up
from worker.executor import Executor, ProgramInfo
from worker.kv_pool import KvPool
from worker.models.rope_tables import rope_tables
from worker.program import load_program
from worker.vocabulary import VocabularySource

WIDTHS = (1, 8, 64, 128, 256)
NUM_CELLS = 150_000
CONTEXT = 2048
PREFILL_TOKENS = 8192
MIXED = (256, (100, 400))
# Short prompts and answers, few at a time: nearly every step has a prompt or two beside its decodes.
CHURN, CHURNING = (512, (32, 128)), 64


@dataclass(frozen=True, slots=True)
class Variant:
    """What is different; the import path of what makes the executor is `benchmarks.ablation:` and `factory`."""

    name: str
    factory: str
    sampling: SamplingParams = GREEDY


VARIANTS = (
    Variant("base", "base"),
    Variant("eager", "eager"),
    Variant("eager prefills", "eager_prefills"),
    Variant("one step", "one_step"),
    Variant("library", "library"),
    Variant("one program a row", "one_program_a_row"),
    Variant("widest", "widest"),
    Variant("host draws", "base", SamplingParams(temperature=0.0, logit_bias=((0, 0.0),))),
    Variant("random", "base", SamplingParams(temperature=1.0, seed=1)),
)


class OneAtATime:
    """An executor that takes one step at a time; see `worker.executor`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.max_steps_in_flight = 1

    @property
    def adapters(self) -> AdapterSlots | None:
        return self._executor.adapters

    @property
    def num_beats(self) -> int:
        return self._executor.num_beats

    def prepare(self, request: Request) -> None:
        self._executor.prepare(request)

    def launch(self, step: Step) -> None:
        self._executor.launch(step)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def close(self) -> None:
        self._executor.close()


def base(config: EngineConfig, _: VocabularySource) -> Executor:
    return _build(config)


def eager(config: EngineConfig, _: VocabularySource) -> Executor:
    return _build(config, capture=LaunchedSteps)


def eager_prefills(config: EngineConfig, _: VocabularySource) -> Executor:
    return _build(config, captured=False)


def one_step(config: EngineConfig, _: VocabularySource) -> Executor:
    return OneAtATime(_build(config))


def library(config: EngineConfig, _: VocabularySource) -> Executor:
    return _build(config, plan=lambda shape, width: plan_decode(shape, width, hopper=False))


def one_program_a_row(config: EngineConfig, _: VocabularySource) -> Executor:
    def plan(shape: DecodeShape, width: int) -> DecodePlan:
        planned = _planned(shape, width)
        if planned.attention.pieces is None:
            return planned
        return replace(planned, attention=AttentionTile(splits=1, block=32, warps=1, stages=3))

    return _build(config, plan=plan)


def widest(config: EngineConfig, _: VocabularySource) -> Executor:
    def capture(step: Callable[[int, Draw], None], widths: Sequence[int], draws: Sequence[Draw]) -> Steps:
        return DecodeGraphs(step, widths[-1:], draws)

    return _build(config, capture=capture)


def _planned(shape: DecodeShape, width: int) -> DecodePlan:
    return plan_decode(shape, width, hopper=torch.cuda.get_device_capability() >= (9, 0))


def _build(
    config: EngineConfig, *, capture: Capture = DecodeGraphs, plan: Plan | None = None, captured: bool = True
) -> CudaExecutor:
    program = load_program(config)
    info: ProgramInfo = replace(program.info, widths=WIDTHS, swap_blocks=0)
    decoder = program.decoder
    cos, sin = rope_tables(decoder.config.rope, decoder.config.head_dim, info.context)
    rotary = cos.to(decoder.device), sin.to(decoder.device)
    pool = KvPool(info.num_layers, info.num_cells, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    decode = CudaDecode(decoder.config, decoder.weights, rotary, pool, WIDTHS, capture=capture, plan=plan or _planned)
    prefill = PrefillChain(decoder.config, decoder.weights, rotary, pool)
    graphs = captured_prefills(info, decoder, prefill, pool) if captured else None
    executor = CudaExecutor(info, decoder, prefill, decode, captured=graphs)
    warm_up(executor, info.num_cells)
    return executor


def measure(folder: Path, variant: Variant, batch_sizes: Sequence[int]) -> dict[str, float]:
    """Milliseconds a step at each batch size, and output tokens a second of a mixed load and of a churning one."""
    config = EngineConfig(
        model=str(folder), device="cuda", load_format="dummy", max_model_len=CONTEXT, max_cells=NUM_CELLS,
        max_num_seqs=WIDTHS[-1], max_prefill_tokens=PREFILL_TOKENS, max_num_batched_tokens=PREFILL_TOKENS,
        prefill_chunk_tokens=CONTEXT, prefix_caching=False,
    )  # fmt: skip
    with open_offline(config, f"benchmarks.ablation:{variant.factory}") as engine:
        bench = OfflineBench(engine, max_in_flight=config.max_waiting, repeats=2, seed=0, sampling=variant.sampling)
        churn = OfflineBench(engine, max_in_flight=CHURNING, repeats=2, seed=0, sampling=variant.sampling)
        bench.warm_up()
        figures = {str(size): bench.decode(size, input_len=128, output_len=128).step_ms for size in batch_sizes}
        figures["mixed"] = bench.mixed(*MIXED).output_tokens_per_s
        figures["churn"] = churn.mixed(*CHURN).output_tokens_per_s
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a model's config.json; weights are random")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--variants", nargs="+", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    chosen = [variant for variant in VARIANTS if args.variants is None or variant.name in args.variants]
    figures: dict[str, dict[str, float]] = {}
    for variant in chosen:
        figures[variant.name] = measure(args.folder, variant, args.batch_sizes)
        print(variant.name, json.dumps(figures[variant.name]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    config = {
        "model": args.folder.name, "device": torch.cuda.get_device_name(), "widths": WIDTHS, "mixed": MIXED,
        "churn": CHURN, "churning": CHURNING, "prefill_tokens": PREFILL_TOKENS, "decode": "128 tokens in, 128 timed",
    }  # fmt: skip
    record("ablation", config, figures, keep=args.keep)


if __name__ == "__main__":
    main()
