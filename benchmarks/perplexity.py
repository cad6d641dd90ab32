"""What weights of fewer bits cost in perplexity: a text's tokens, as the whole worker scores them.

Each number of bits is an engine of its own, asked for the log probabilities of a prompt's own tokens: once in one
forward, and once in chunks of few rows, which on a GPU other kernels multiply.

    python -m benchmarks.perplexity --model smollm2-135m --device cuda --keep
"""

from __future__ import annotations

import argparse
import math
import os

import numpy as np

from benchmarks.record import record
from cluster.checkpoints import resolve
from cluster.language.text import load_text
from planner.request import Request
from tests.quiet_text import TEXT
from tests.turns import Turns
from worker.config import EngineConfig, Quantization
from worker.executor import Executor, limits_for
from worker.program import build_executor

KINDS: tuple[Quantization, ...] = ("none", "int8", "int4", "fp8")
"""The last one is for a GPU alone."""
CHUNK = 48


def perplexity(executor: Executor, config: EngineConfig, tokens: list[int]) -> float:
    turns = Turns(limits_for(config, executor.info, 1), executor, checked=False)
    request = Request(np.array(tokens, dtype=np.int64), 0, prompt_logprobs=True)
    executor.prepare(request)
    (updates,) = turns.updates([request])
    told = [each for update in updates for each in update.prompt_logprobs]
    scores = [each.logprob for each in told if each.logprob is not None]
    assert len(scores) == len(tokens) - 1
    return math.exp(-sum(scores) / len(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="all that the device has, unless named")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    path = resolve(options.model)
    tokens = load_text(path).encode(TEXT)
    figures: dict[str, dict[str, float]] = {}
    for kind in options.kinds or (KINDS if options.device == "cuda" else KINDS[:-1]):
        figures[kind] = {}
        for name, chunk in (("whole", len(tokens)), ("chunks", CHUNK)):
            config = EngineConfig(
                model=os.fspath(path), device=options.device, dtype="bfloat16", quantization=kind, max_model_len=512,
                max_cells=1024, max_num_seqs=4, max_prefill_tokens=512, max_num_batched_tokens=chunk, swap_space=0,
            )  # fmt: skip
            executor = build_executor(config)
            figures[kind][name] = perplexity(executor, config, tokens)
            executor.close()
            print(f"{kind:5} {name:7} {figures[kind][name]:8.3f}", flush=True)
    config_of_run = {"model": options.model, "device": options.device, "tokens": len(tokens), "chunk": CHUNK}
    record("perplexity", config_of_run, {"perplexity": figures}, keep=options.keep)


if __name__ == "__main__":
    main()
