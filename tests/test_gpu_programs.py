"""Programs on a GPU: each against its own eager model, with captured graphs and without; and how its pool is sized.

Every program is compiled by a process of its own, all at once, since most of that time is a C++ compiler's. The rule
for tokens: a greedy token is right where the eager model scores it within a gap of its best, as rows that are computed
with others, or by kernels that round elsewhere, differ by that much. The gap is stated for each kind below.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from planner.errors import InvalidConfiguration
from planner.request import Request
from planner.slices import Method, Slice
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, chunk, request
from worker.attention import Span, TorchAttention
from worker.attention_op import attention_of
from worker.batch import Batch, cut
from worker.config import EngineConfig
from worker.cuda.prefill_graphs import PREFILL_WIDTHS
from worker.forwards import EagerForwards, Forwards
from worker.kv_pool import KvPool
from worker.program import Program, build_executor, load_program
from worker.programs.forwards import Methods, ProgramForwards, decode_ladder
from worker.programs.loading import load_methods
from worker.programs.metadata import ProgramMetadata, read_metadata
from worker.programs.on_gpu import capture_methods
from worker.torch_executor import TorchExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("programs"),  # else each process compiles them for itself
]

DEVICE = torch.device("cuda")
NUM_CELLS, WIDTHS = 256, (1, 2, 4, 8)
# Weights that keep rounding errors as small as those of trained models: larger ones make a tiny model chaotic.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.05}
EXPORT = """
import json, sys
from pathlib import Path
from worker.config import EngineConfig
from worker.cuda.prefill_graphs import PREFILL_WIDTHS
from worker.programs.export import export_model
export_model(EngineConfig(**json.loads(sys.argv[1])), Path(sys.argv[2]), (1,), {}, print)
"""


@dataclass(frozen=True)
class Kind:
    """A way to export. Logits are off by at most `error` of their size, and tokens by `gap`: logits have a standard
    deviation of 0.5. Without a rounding to eight bits the error was 0.008 in a trial, with it 0.05."""

    settings: dict[str, Any] = field(default_factory=dict)
    error: float = 0.02
    gap: float = 0.05


KINDS = {
    "none": Kind(),
    "none, m = W": Kind({"max_prefill_tokens": 8, "min_prefill_tokens": 8}),
    "int8": Kind({"quantization": "int8", "min_prefill_tokens": 5}),
    "int4": Kind({"quantization": "int4", "min_prefill_tokens": 5}),
    "fp8": Kind({"quantization": "fp8"}, error=0.15, gap=0.3),
}


class Capture(Enum):
    NOTHING = "nothing"
    DECODES = "decodes"
    ALL = "all"


@dataclass(frozen=True)
class Subject:
    """A program, and its eager model."""

    kind: Kind
    path: Path
    metadata: ProgramMetadata
    methods: Methods
    eager: Program

    def pool(self) -> KvPool:
        info = self.eager.info
        return KvPool(info.num_layers, NUM_CELLS, info.num_kv_heads, info.head_dim, torch.bfloat16, DEVICE)

    def forwards(self, pool: KvPool, capture: Capture) -> ProgramForwards:
        methods = Methods(decode_ladder(self.metadata, self.methods, WIDTHS), self.methods.prefill)
        widths = PREFILL_WIDTHS if capture is Capture.ALL else ()
        graphs = None if capture is Capture.NOTHING else capture_methods(self.metadata, methods, pool, widths)
        return ProgramForwards(self.metadata, pool, methods.decodes, methods.prefill, graphs)

    def executor(self, **settings: Any) -> TorchExecutor:
        told = {"model": str(self.path), "max_cells": NUM_CELLS, "max_num_seqs": WIDTHS[-1], "swap_space": 0.0}
        executor = build_executor(EngineConfig(**(told | settings)))
        assert isinstance(executor, TorchExecutor)
        return executor


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """The exporting processes by kind, and the folder of each."""
    if shutil.which("g++") is None:
        pytest.skip("exporting compiles C++, and there is no g++")
    started = {}
    for name, kind in KINDS.items():
        folder = tmp_path_factory.mktemp("program")
        save_tiny_model("qwen2_windows", folder, sizes=SIZES)
        command = [sys.executable, "-c", EXPORT, json.dumps(settings_of(kind, folder)), str(folder / "tiny.pt2")]
        with (folder / "log").open("w") as log:
            started[name] = (folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True))
    yield started
    for _, process in started.values():
        process.kill()
        process.wait()


def settings_of(kind: Kind, folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "device": "cuda", "dtype": "bfloat16", "max_prefill_tokens": 32} | kind.settings


@pytest.fixture(scope="module", params=list(KINDS))
def subject(request: pytest.FixtureRequest, exports: dict[str, tuple[Path, subprocess.Popen[str]]]) -> Subject:
    name: str = request.param
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of fp8")
    folder, process = exports[name]
    assert process.wait(400) == 0, f"exporting {name} failed:\n{(folder / 'log').read_text()[-4000:]}"
    metadata = read_metadata(folder / "tiny.pt2")
    methods = load_methods(folder / "tiny.pt2", metadata)
    eager = load_program(EngineConfig(**settings_of(KINDS[name], folder)))
    return Subject(KINDS[name], folder / "tiny.pt2", metadata, methods, eager)


def test_a_program_declares_the_bounds_of_its_kernels(subject: Subject) -> None:
    assert subject.metadata.min_prefill_tokens == subject.kind.settings.get("min_prefill_tokens", 2)
    assert subject.metadata.weight_bytes == subject.eager.info.weight_bytes


@pytest.mark.parametrize("capture", [Capture.NOTHING, Capture.ALL], ids=["launched", "captured"])
def test_a_program_gives_the_logits_of_its_eager_model(subject: Subject, capture: Capture) -> None:
    """Prefills of m - 1, m, m + 1 and W tokens, selecting 0, 1, m - 1, m, m + 1 or all rows, and decodes."""
    m, w = subject.metadata.min_prefill_tokens, subject.metadata.max_prefill_tokens
    pools = subject.pool(), subject.pool()
    ours = subject.forwards(pools[0], capture)
    theirs = EagerForwards(subject.eager.decoder, pools[1])
    prefills = [(m - 1,), (m,), (w,), (w - 2, 1, 1), *([(m + 1,), (w // 2, 1, 7)] if m < w else [])]
    batches = [(batch_of(lengths), Method.PREFILL) for lengths in prefills]
    batches += [(batch_of((1,) * rows), Method.DECODE) for rows in (1, 3, 8) if rows == 1 or m <= 8]
    for batch, method in batches:
        num_rows = len(batch.tokens)
        for size in sorted({min(size, num_rows) for size in (0, 1, m - 1, m, m + 1, num_rows)}):
            wanted = list(range(num_rows - size, num_rows))
            with torch.inference_mode():
                found, expected = (run.run(batch, method, wanted) for run in (ours, theirs))
                if wanted:
                    what = f"{method} of {num_rows} tokens, {size} rows wanted"
                    compare(found.rows(wanted), expected.rows(wanted), subject.kind, what)
        written = np.concatenate([p.chunk.cells[p.start : p.start + p.length] for p in batch.pieces]).astype(np.int64)
        assert relative(pools[0].keys[:, written], pools[1].keys[:, written]) < subject.kind.error
        assert relative(pools[0].values[:, written], pools[1].values[:, written]) < subject.kind.error


def test_captured_decodes_give_bit_by_bit_what_launched_ones_give(subject: Subject) -> None:
    """Through a load whose rows come and go: the prompts, then decodes of some of the sequences, one after another."""
    pools = subject.pool(), subject.pool()
    captures = Capture.DECODES, Capture.NOTHING  # a captured prefill is padded, and so are its matrix products
    runs = [subject.forwards(pool, capture) for pool, capture in zip(pools, captures, strict=True)]
    lengths = [7, 3, 8]  # one is narrower than any m, and none wider than any W
    cells = [list(range(80 * number, 80 * number + 40)) for number in range(3)]
    for number, length in enumerate(lengths):
        same(runs, chunks_batch([chunk(tokens_of(length), cells[number][:length])], Method.PREFILL), Method.PREFILL)
    for step, chosen in enumerate(((0, 1, 2), (1,), (0, 2), (2, 1, 0), (2,), (0,))):
        chunks = []
        for number in chosen:
            end = lengths[number] + 1
            chunks.append(chunk([7 * step + number], cells[number][:end], start=end - 1, sequence_id=number + 1))
            lengths[number] = end
        same(runs, chunks_batch(chunks, Method.DECODE), Method.DECODE)
    for pool in pools:  # what padding leaves in the scratch cell depends on who wrote last
        pool.keys[:, NUM_CELLS], pool.values[:, NUM_CELLS] = 0, 0
    written = [cell for number in range(3) for cell in cells[number][: lengths[number]]]
    assert torch.equal(pools[0].keys[:, written], pools[1].keys[:, written])
    assert torch.equal(pools[0].values[:, written], pools[1].values[:, written])


def test_answers_are_the_eager_models_alone_batched_and_in_chunks(subject: Subject) -> None:
    """With graphs and without."""
    asked = prompts()
    captured, launched = subject.executor(), subject.executor(cuda_graph=False)
    assert captured.info.widths == launched.info.widths
    assert captured.info.widths[-1] == 8
    for executor in (captured, launched):
        for told in ({}, {"prefill_chunk_tokens": 4}):
            check_answers(subject, asked, Rig(executor, max_num_seqs=8, **told).answer(asked))
        check_answers(subject, asked, Rig(executor, max_num_seqs=8).answer_alone(asked))


def test_the_pool_takes_what_is_left_beside_weights_and_graphs(subject: Subject) -> None:
    """A hundredth of the device: most of it, and not much more, as others here give memory back meanwhile."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    given = total // 100
    executor = subject.executor(max_cells=None, gpu_memory_utilization=1 - (free - given) / total)
    taken = executor.info.num_cells * executor.info.bytes_per_cell
    assert 0.5 < taken / given < 1.2, (taken, given)
    rig = Rig(executor, max_num_seqs=8)
    check_answers(subject, prompts()[:2], rig.answer(prompts()[:2]))


def test_a_device_without_room_for_one_context_is_refused_with_the_numbers(subject: Subject) -> None:
    with pytest.raises(InvalidConfiguration, match="a context is 256"):
        subject.executor(max_cells=None, gpu_memory_utilization=0.0001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_attends_as_the_oracle_does(dtype: torch.dtype) -> None:
    """Against float64, a forward with chunks and one of lone tokens."""
    torch.manual_seed(0)
    pool, oracle_pool = (KvPool(2, NUM_CELLS, 2, 64, kind, DEVICE) for kind in (dtype, torch.float64))
    for side in ("keys", "values"):
        getattr(pool, side).normal_()
        getattr(oracle_pool, side).copy_(getattr(pool, side))
    order = np.random.default_rng(0).permutation(NUM_CELLS).astype(np.int32)
    chunks = [Span(0, 30, 1, order[:31]), Span(1, 0, 40, order[31:71]), Span(41, 90, 5, order[71:166])]
    lone = [Span(0, 30, 1, order[:31]), Span(1, 0, 1, order[31:32]), Span(2, 130, 1, order[71:202])]
    windows = (None, 9)
    for spans in (chunks, lone):
        rows = sum(span.length for span in spans)
        query = torch.randn(rows, 4, 64, dtype=dtype, device=DEVICE)
        key, value = torch.randn(2, rows, 2, 64, dtype=dtype, device=DEVICE).unbind(0)
        ours, oracle = attention_of(pool, spans, windows, 4), TorchAttention(oracle_pool, spans, windows)
        for layer in range(2):
            found = ours.attend(layer, query, key, value)
            expected = oracle.attend(layer, query.double(), key.double(), value.double())
            assert relative(found, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-6), f"layer {layer}"
            assert torch.equal(pool.keys[layer].double(), oracle_pool.keys[layer])
            assert torch.equal(pool.values[layer].double(), oracle_pool.values[layer])


def tokens_of(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(length).integers(0, 97, size=length).tolist()
    return tokens


def prompts() -> list[Request]:
    return [request(tokens_of(length), 6) for length in (1, 3, 5, 8, 17, 40)]


def batch_of(lengths: Sequence[int]) -> Batch:
    """Fresh sequences of these lengths."""
    chunks, first = [], 0
    for number, length in enumerate(lengths):
        tokens = tokens_of(length + number)[:length]
        chunks.append(chunk(tokens, range(first, first + length), sequence_id=number + 1))
        first += length
    return chunks_batch(chunks, Method.PREFILL)


def chunks_batch(chunks: Sequence[Any], method: Method) -> Batch:
    batch = cut(chunks, Slice(0, sum(c.length for c in chunks), method), wanted=lambda index: True)
    assert batch is not None
    return batch


def same(runs: Sequence[Forwards], batch: Batch, method: Method) -> None:
    rows = list(range(len(batch.tokens)))
    with torch.inference_mode():
        captured, launched = (run.run(batch, method, rows).rows(rows) for run in runs)
        assert torch.equal(captured, launched), f"{method} of {len(rows)} rows: off by {relative(captured, launched)}"


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def compare(found: Tensor, expected: Tensor, kind: Kind, what: str) -> None:
    assert found.shape == expected.shape, what
    assert relative(found, expected) < kind.error, f"{what}: off by {relative(found, expected)}"
    behind = expected.amax(-1) - expected.gather(1, found.argmax(-1)[:, None])[:, 0]
    assert float(behind.max()) < kind.gap, f"{what}: a greedy token is {float(behind.max())} behind the eager model's"


def check_answers(subject: Subject, asked: Sequence[Request], answers: Sequence[list[list[int]]]) -> None:
    """Each token is one that the eager model, given all before it, scores within the gap of its best."""
    eager = EagerForwards(subject.eager.decoder, subject.pool())
    for one, (answer,) in zip(asked, answers, strict=True):
        whole = [*one.prompt.tolist(), *answer]
        batch = chunks_batch([chunk(whole[:-1], range(len(whole) - 1))], Method.PREFILL)
        rows = list(range(len(one.prompt) - 1, len(whole) - 1))
        with torch.inference_mode():
            scores = eager.run(batch, Method.PREFILL, rows).rows(rows)
        behind = scores.amax(-1) - scores.gather(1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        assert float(behind.max()) < subject.kind.gap, (len(one.prompt), answer, behind.tolist())
