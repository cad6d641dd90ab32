# mypy: allow-untyped-calls
"""Raycomb's engine, vLLM's and transformers' continuous batching on one GPU: the same loads, one side a process.

Random weights, bfloat16, greedy, no prefix cache. `decode`: B prompts of 128 tokens, the time for 257 tokens less the
time for one. `mixed`: 256 prompts of 100..1024 tokens, answers of 100..1024, at once. `prefill`: 64 prompts of 2,048
tokens, one token each. Every load runs twice, and the faster run counts. Each side needs only its own packages, so run
it in its own environment; the last command puts the sides together, with floors and ratios (above 1: ours is faster).

    python -m benchmarks.against_vllm raycomb qwen3-0.6b --output ours.json
    python -m benchmarks.against_vllm vllm qwen3-0.6b --output theirs.json
    python -m benchmarks.against_vllm transformers qwen3-0.6b --output others.json
    python -m benchmarks.against_vllm compare ours.json theirs.json others.json --keep
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from cluster.bench import workload
from cluster.bench.workload import Item
from worker.config import KvCacheDtype

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
SEED = 0
READ_BYTES_PER_S = 4.38e12  # measured on an H200; `benchmarks.decode_step`
# A full step of prompts and room for as many decodes as may run, so that decodes do not push prompts into another step.
STEP_TOKENS = 16_384 + 256
# Transformers is measured at one batch size, and for fewer tokens: it is not the rival here.
TRANSFORMERS_BATCH, TRANSFORMERS_TOKENS = 64, 64
_COMMON = {
    "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 500_000.0, "tie_word_embeddings": False,
        "bos_token_id": 128_000, "eos_token_id": 128_001,
    },
    "qwen3-0.6b": _COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
        "bos_token_id": 151_643, "eos_token_id": 151_645,
    },
}  # fmt: skip

Seconds = Callable[[Sequence[Item]], float]
"""Runs a load to its end, every answer at full length."""


def loads_s(seconds: Seconds, vocab_size: int, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """What one side does on all loads."""

    def uniform(num_prompts: int, input_len: int, output_len: int) -> list[Item]:
        return workload.uniform(num_prompts, input_len, output_len, vocab_size=vocab_size, seed=SEED)

    def faster(items: Sequence[Item]) -> float:
        return min(seconds(items) for _ in range(2))

    seconds(uniform(4, 128, 8))
    figures: dict[str, Any] = {}
    for batch in batch_sizes:
        one, full = faster(uniform(batch, 128, 1)), faster(uniform(batch, 128, 257))
        figures[f"decode{batch}_ms"] = (full - one) / 256 * 1e3
        print(batch, figures[f"decode{batch}_ms"], flush=True)
    mixed = workload.mixed(256, (100, 1024), vocab_size=vocab_size, seed=SEED)
    runs_s = [seconds(mixed) for _ in range(2)]
    figures["mixed256_tok_s"] = workload.total_output(mixed) / min(runs_s)
    figures["mixed256_first_tok_s"] = workload.total_output(mixed) / runs_s[0]
    prefill = uniform(64, 2048, 1)
    figures["prefill_tok_s"] = workload.total_input(prefill) / faster(prefill)
    print(figures, flush=True)
    return figures


def raycomb(
    folder: str, shape: dict[str, Any], batch_sizes: Sequence[int], kv_cache_dtype: KvCacheDtype = "auto"
) -> dict[str, Any]:
    from cluster.bench.offline import OfflineBench
    from cluster.offline.engine import open_offline
    from worker.config import EngineConfig

    began = time.perf_counter()
    config = EngineConfig(
        model=folder, device="cuda", load_format="dummy", max_model_len=4096, max_num_seqs=256,
        max_prefill_tokens=STEP_TOKENS, max_num_batched_tokens=STEP_TOKENS, prefill_chunk_tokens=2048,
        prefix_caching=False, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    with open_offline(config) as engine:
        started = time.perf_counter() - began
        bench = OfflineBench(engine, max_in_flight=config.max_waiting, repeats=1, seed=SEED)
        figures = loads_s(bench.seconds, shape["vocab_size"], batch_sizes)
        info = engine.info
    sizes = {"weight_bytes": info.weight_bytes, "bytes_per_cell": info.bytes_per_cell, "num_cells": info.num_cells}
    made = {"kv_cache_dtype": kv_cache_dtype, "torch": version("torch"), "triton": version("triton")}
    return {**figures, **sizes, "startup_s": started, **made}


def vllm(folder: str, shape: dict[str, Any], batch_sizes: Sequence[int]) -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as ours: the engine in this process
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # in an environment of its own

    began = time.perf_counter()
    engine = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16",
        gpu_memory_utilization=0.8, enable_prefix_caching=False, max_num_seqs=512, seed=SEED,
    )  # fmt: skip
    started = time.perf_counter() - began

    def seconds(items: Sequence[Item]) -> float:
        prompts = [{"prompt_token_ids": list(item.prompt)} for item in items]
        settings = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len, detokenize=False)
            for item in items
        ]
        start = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        return time.perf_counter() - start

    figures = loads_s(seconds, shape["vocab_size"], batch_sizes)
    return {**figures, "startup_s": started, "vllm": version("vllm"), "torch": version("torch")}


def transformers(folder: str, shape: dict[str, Any], batch_sizes: Sequence[int]) -> dict[str, Any]:
    """One batch size: its time includes what the continuous batching sets up for every batch, once with many tokens
    and once with one, and the difference counts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def seconds(output_len: int) -> float:
        items = workload.uniform(TRANSFORMERS_BATCH, 128, output_len, vocab_size=shape["vocab_size"], seed=SEED)
        settings = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1)
        start = time.perf_counter()
        answers = model.generate_batch([list(item.prompt) for item in items], generation_config=settings)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        told = sum(len(answer.generated_tokens) for answer in answers.values())
        assert told == workload.total_output(items), f"{told} tokens came where {workload.total_output(items)} were due"
        return elapsed

    seconds(8)
    step_ms = (seconds(1 + TRANSFORMERS_TOKENS) - seconds(1)) / TRANSFORMERS_TOKENS * 1e3
    return {f"decode{TRANSFORMERS_BATCH}_ms": step_ms, "transformers": version("transformers")}


SIDES: dict[str, Callable[..., dict[str, Any]]] = {"raycomb": raycomb, "vllm": vllm, "transformers": transformers}


def compared(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By shape: what each side did, each rival's time over ours, and the share of the floor that a decode reaches."""
    shapes: dict[str, Any] = {}
    for result in results:
        shapes.setdefault(result["shape"], {})[result["side"]] = result["figures"]
    for sides in shapes.values():
        ours = sides["raycomb"]
        for rival in sides.keys() - {"raycomb"}:
            sides[f"raycomb_over_{rival}"] = _ratios(ours, sides[rival])
        sides["of_floor"] = {
            name: _floor_ms(ours, int(name.removeprefix("decode").removesuffix("_ms"))) / value
            for name, value in ours.items()
            if name.startswith("decode")
        }
    return shapes


def _ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    times = {name: theirs[name] / ours[name] for name in ours.keys() & theirs.keys() if name.endswith("_ms")}
    rates = {name: ours[name] / theirs[name] for name in ours.keys() & theirs.keys() if name.endswith("tok_s")}
    return {name: round(ratio, 3) for name, ratio in sorted({**times, **rates}.items())}


def _floor_ms(ours: dict[str, Any], batch: int) -> float:
    """Of a decode of 128..384 tokens of context."""
    return float((ours["weight_bytes"] + batch * 256 * ours["bytes_per_cell"]) / READ_BYTES_PER_S * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for side in SIDES:
        command = commands.add_parser(side)
        command.add_argument("shape", choices=SHAPES)
        command.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
        command.add_argument("--output", type=Path, required=True)
        if side == "raycomb":
            command.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDtype), default="auto")
    compare = commands.add_parser("compare")
    compare.add_argument("results", type=Path, nargs="+")
    compare.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    if args.command == "compare":
        from benchmarks.record import record

        config = {"seed": SEED, "read_bytes_per_s": READ_BYTES_PER_S, "step_tokens": STEP_TOKENS}
        record(
            "offline-h200", config, compared([json.loads(path.read_text()) for path in args.results]), keep=args.keep
        )
        return
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        options = {"kv_cache_dtype": args.kv_cache_dtype} if args.command == "raycomb" else {}
        figures = SIDES[args.command](folder, shape, args.batch_sizes, **options)
    args.output.write_text(json.dumps({"side": args.command, "shape": args.shape, "figures": figures}) + "\n")


if __name__ == "__main__":
    main()
