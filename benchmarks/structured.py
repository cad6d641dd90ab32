"""Structured answers through the whole worker: do all of them fit, and what do they cost?

* `schemas`: random JSON schemas (tests/random_schemas.py), 32 at a time, temperature 1; every completed answer is
  validated with `jsonschema`.
* `speed`: for each number of `--rows`, so many sequences of one open-ended schema, the same with each token drawn by
  itself (what the schema leaves no choice in is else fed at once), and free ones of the same length; tokens per second
  and steps of each, and milliseconds of a step's parts (`benchmarks/step_times.py`; 50th, 90th and 99th percentile).
* `first`: time from submit to first token, alone, of a schema seen before, of a new one, and of a free answer.

    python -m benchmarks.structured --model smollm2-135m --num-schemas 500
    python -m benchmarks.structured --model smollm2-135m --layers 2   # random weights: the same vocabulary, little else
    python -m benchmarks.structured --model smollm2-135m --shape llama-8b --device cuda   # a large model's steps
    python -m benchmarks.structured --model smollm2-135m --rows 1 8 32 --num-schemas 0   # speed alone
    python -m benchmarks.structured --no-model   # only the grammars, over the model's vocabulary

`--layers` writes a small Llama with random weights over the model's own vocabulary, `--shape` one of the shapes that
the GPU's figures are of. With neither the real model runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from benchmarks.against_vllm import SHAPES
from benchmarks.mask_times import mask_times
from benchmarks.record import record
from benchmarks.step_times import StepTimes, TimedMasks
from cluster.answers.structured import check_form, json_form
from cluster.checkpoints import resolve
from cluster.language.text import TextModel, load_text
from planner.errors import GrammarFailed
from planner.planner import Planner
from planner.request import FinishReason, Request, SamplingParams, Update
from tests.random_schemas import random_schema
from worker.config import EngineConfig, LoadFormat
from worker.executor import Executor, limits_for
from worker.grammars import Grammars
from worker.masks import ConstrainedRow
from worker.program import build_executor_with, mask_maker

BATCH = 32
PROMPT = "Answer in JSON: describe one thing that you know."
OPEN_ENDED = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer", "minimum": 0}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}


class Rig:
    """A planner and an executor, with as many steps in flight as it takes."""

    def __init__(
        self, executor: Executor, config: EngineConfig, text: TextModel, masks: TimedMasks, times: StepTimes
    ) -> None:
        """`masks` are the executor's."""
        self.executor, self.text, self.masks, self.times = executor, text, masks, times
        self.prompt = np.array(text.encode(PROMPT), dtype=np.int64)
        self._depth = executor.max_steps_in_flight
        self._planner = Planner(limits_for(config, executor.info, self._depth))

    @property
    def num_steps(self) -> int:
        """Planned so far."""
        return self._planner.metrics.num_steps

    def request(self, seed: int, grammar: str | None, max_tokens: int, *, endless: bool = False) -> Request:
        sampling = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
        stops = frozenset() if endless else self.text.eos_ids
        return Request(self.prompt, max_tokens, sampling, stop_token_ids=stops)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Update]]:
        """Updates by the request's place, as they come; the executor hears of a request when it is submitted."""
        places = {}
        for place, request in enumerate(requests):
            places[self._planner.submit(request)] = place
            self.executor.prepare(request)
        in_flight = []
        while self._planner.has_work:
            with self.times.timing("plan"):
                step = self._planner.plan()
            if step is not None:
                self.times.launch(self.executor, step)
                in_flight.append(step)
            if step is None or len(in_flight) == self._depth:
                with self.times.timing("collect"):
                    result = self.executor.collect()
                with self.times.timing("commit"):
                    updates = self._planner.commit(in_flight.pop(0), result)
                for update in updates:
                    yield places[update.request_id], update


def schemas(rig: Rig, num_schemas: int, limit_s: float) -> dict[str, Any]:
    """How the answers to random schemas ended; stops after `limit_s`."""
    ends: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    num_tokens, began = 0, time.perf_counter()
    for first in range(0, num_schemas, BATCH):
        if time.perf_counter() - began > limit_s:
            break
        asked = [random_schema(seed) for seed in range(first, min(first + BATCH, num_schemas))]
        forms = [json_form("schema", schema) for schema in asked]
        for form in forms:
            check_form(form)
        tokens: list[list[int]] = [[] for _ in asked]
        for place, update in rig.run([rig.request(first + i, form.grammar, 400) for i, form in enumerate(forms)]):
            tokens[place] += update.tokens
            if update.finish_reason is None:
                continue
            ends[update.finish_reason.value] += 1
            num_tokens += len(tokens[place])
            if update.finish_reason is FinishReason.STOP:
                answer = rig.text.decode(tokens[place], with_special=False)
                if not _fits(answer, asked[place]):
                    wrong.append({"schema": asked[place], "answer": answer})
    seconds = time.perf_counter() - began
    return {"ends": dict(ends), "num_wrong": len(wrong), "wrong": wrong[:5], "tokens": num_tokens, "seconds": seconds}


def _fits(answer: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def walks(text: TextModel, num_schemas: int, max_tokens: int = 400) -> dict[str, Any]:
    """The same without a model: tokens drawn evenly from what the masks allow, which leads into every corner."""
    grammars, ends, num_wrong, num_tokens = Grammars(text.vocabulary), Counter[str](), 0, 0
    began = time.perf_counter()
    for seed in range(num_schemas):
        schema, draw, tokens = random_schema(seed), random.Random(seed), list[int]()
        grammar = json_form("schema", schema).grammar
        while True:
            (mask,) = grammars.masks([ConstrainedRow(seed, grammar, np.array(tokens, dtype=np.int64))])
            assert not isinstance(mask, GrammarFailed), mask
            tokens.append(draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()))
            if tokens[-1] in text.eos_ids or len(tokens) == max_tokens:
                break
        stopped = tokens[-1] in text.eos_ids
        ends["stop" if stopped else "length"] += 1
        num_tokens += len(tokens)
        num_wrong += stopped and not _fits(text.decode(tokens, with_special=False), schema)
        grammars.drop([seed])
    grammars.close()
    seconds = time.perf_counter() - began
    return {"ends": dict(ends), "num_wrong": num_wrong, "tokens": num_tokens, "seconds": seconds}


def speed(rig: Rig, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """Tokens per second of so many sequences: the better of two runs, behind one that warms up."""
    grammar = json_form("schema", OPEN_ENDED).grammar
    found: dict[str, Any] = {}
    for name, chosen, forces in (("free", None, True), ("schema", grammar, True), ("one_by_one", grammar, False)):
        rig.masks.forces = forces
        rates = []
        for _ in range(3):
            rig.times.take()
            began, before = time.perf_counter(), rig.num_steps
            requests = [rig.request(seed, chosen, num_tokens, endless=True) for seed in range(num_rows)]
            made = sum(len(update.tokens) for _, update in rig.run(requests))
            rates.append(made / (time.perf_counter() - began))
        found[f"{name}_tokens_per_s"] = max(rates[1:])
        found[f"{name}_ms"] = 1000 * num_rows / max(rates[1:])
        found[f"{name}_steps"] = rig.num_steps - before
        found[f"{name}_parts_ms"] = rig.times.take()
    rig.masks.forces = True
    ratio = found["schema_tokens_per_s"] / found["free_tokens_per_s"]
    return found | {"ratio": ratio, "over_one_by_one": found["schema_tokens_per_s"] / found["one_by_one_tokens_per_s"]}


def first(rig: Rig, repeats: int) -> dict[str, float]:
    """Milliseconds to the first token at the median."""
    known = json_form("schema", random_schema(0)).grammar
    list(rig.run([rig.request(0, known, 1)]))
    fresh = [json_form("schema", random_schema(10_000 + i)).grammar for i in range(repeats)]
    kinds: dict[str, list[str | None]] = {"free": [None] * repeats, "known": [known] * repeats, "new": [*fresh]}
    found = {}
    for name, grammars in kinds.items():
        times = []
        for seed, grammar in enumerate(grammars):
            began = time.perf_counter()
            list(rig.run([rig.request(seed, grammar, 1)]))
            times.append(1000 * (time.perf_counter() - began))
        found[f"{name}_ms"] = statistics.median(times)
    return found


@contextmanager
def checkpoint(path: Path, sizes: dict[str, Any] | None) -> Iterator[tuple[str, LoadFormat]]:
    """The model's path and its load format; with `sizes`, of a model with random weights."""
    if sizes is None:
        yield str(path), "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        yield folder, "dummy"


def _sizes(text: TextModel, layers: int | None, shape: str | None) -> dict[str, Any] | None:
    """What `config.json` says of the model with random weights that was asked for, if one was."""
    if shape is not None:
        return SHAPES[shape] | {"vocab_size": text.vocab_size}
    if layers is None:
        return None
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": text.vocab_size,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    random_weights = parser.add_mutually_exclusive_group()
    random_weights.add_argument("--layers", type=int)
    random_weights.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--no-model", action="store_true", help="only the grammars, drawn from evenly")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--num-schemas", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--speed-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[BATCH], help="sequences at once, for `speed`")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--trial", action="store_true", help="keep no result file")
    args = parser.parse_args()
    path = Path(resolve(args.model))
    text = load_text(path)
    if args.no_model:
        told = {"model": args.model, "num_schemas": args.num_schemas, "vocab_size": text.vocab_size}
        alike, apart = [OPEN_ENDED] * BATCH, [random_schema(seed) for seed in range(BATCH)]
        masks = {
            name: mask_times(
                text.vocabulary(), [json_form("schema", schema).grammar for schema in asked], num_steps=128
            )
            for name, asked in (("one_schema", alike), ("random_schemas", apart))
        }
        figures = {"masks": masks, "walks": walks(text, args.num_schemas)}
        record("structured-no-model", told, figures, keep=not args.trial)
        return
    with checkpoint(path, _sizes(text, args.layers, args.shape)) as (model, load_format):
        config = EngineConfig(
            model=model, device=args.device, load_format=load_format, max_cells=65_536, num_threads=args.num_threads
        )
        times = StepTimes(on_gpu=args.device == "cuda")
        timed = TimedMasks(mask_maker(text.vocabulary), times)
        executor = build_executor_with(config, timed)
        rig = Rig(executor, config, text, timed, times)
        figures = {
            "first": first(rig, 20),
            "speed": {f"{rows}_rows": speed(rig, rows, args.speed_tokens) for rows in args.rows},
            "schemas": schemas(rig, args.num_schemas, args.limit_s),
        }
        info = executor.info
        told = vars(args) | {"batch": BATCH, "dtype": info.dtype, "vocab_size": info.vocab_size}
        executor.close()
    kind = "structured"
    if args.shape is not None:
        kind += f"-{args.shape}"
    elif args.layers is not None:
        kind += f"-{args.layers}-layers"
    record(f"{kind}-{args.device}", told, figures, keep=not args.trial)


if __name__ == "__main__":
    main()
