"""How forwards of a program are cut, padded and selected, with methods that are traced and not compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from planner.slices import Method, Slice
from tests.tiny_models import save_tiny_model
from tests.torch_rig import chunk, executor_of, load, run_step, token_of
from worker.batch import Batch, cut
from worker.config import EngineConfig, Quantization
from worker.cuda.fp8 import fp8_weights
from worker.cuda.packed import pack_weights
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool
from worker.models.decoder import Decoder
from worker.program import Program
from worker.programs.export import ExportSource, load_source, trace
from worker.programs.forwards import Methods, ProgramForwards, Rows, decode_ladder
from worker.programs.metadata import ProgramMetadata
from worker.programs.traced import TracedDecoder
from worker.torch_executor import TorchExecutor

W, M, NUM_CELLS = 8, 5, 64
PROMPT = [5, 17, 3, 80, 41, 9, 66, 2]


class Recorder:
    """A compiled method's stand-in: runs the traced graph, and keeps what it was called with."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.calls: list[tuple[list[int], list[int]]] = []  # tokens, selector

    def __call__(self, tokens: Tensor, positions: Tensor, selector: Tensor, *rest: Any) -> Tensor:
        self.calls.append((tokens.tolist(), selector.tolist()))
        logits: Tensor = self._graph(tokens, positions, selector, *rest)
        return logits


class Traced:
    """Forwards of a traced program and of the eager decoder, each over a pool of its own."""

    def __init__(self, program: Program, metadata: ProgramMetadata, prefill: Any, decodes: dict[int, Any]) -> None:
        self.metadata = metadata
        self.prefill, self.decodes = Recorder(prefill), {width: Recorder(graph) for width, graph in decodes.items()}
        self.pool, self.eager_pool = _pool(program), _pool(program)
        self.forwards = ProgramForwards(metadata, self.pool, self.decodes, self.prefill)
        self.eager = EagerForwards(program.decoder, self.eager_pool)

    def compare(self, batch: Batch, method: Method, wanted: list[int]) -> None:
        """Both give the same logits of `wanted`, and write the same cells."""
        with torch.inference_mode():
            ours = self.forwards.run(batch, method, wanted)
            theirs = self.eager.run(batch, method, wanted)
            if wanted:
                torch.testing.assert_close(ours.rows(wanted), theirs.rows(wanted), rtol=1e-4, atol=1e-4)
        written = np.concatenate([p.chunk.cells[p.start : p.start + p.length] for p in batch.pieces])
        torch.testing.assert_close(self.pool.keys[:, written], self.eager_pool.keys[:, written], rtol=1e-4, atol=1e-4)


def _pool(program: Program) -> KvPool:
    info = program.info
    return KvPool(info.num_layers, NUM_CELLS, info.num_kv_heads, info.head_dim, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("mistral")
    save_tiny_model("mistral_window", folder)
    loaded = load(str(folder), max_prefill_tokens=W, min_prefill_tokens=M)
    return replace(loaded, info=replace(loaded.info, widths=(1, 4)))


@pytest.fixture(scope="module")
def graphs(program: Program) -> tuple[Any, dict[int, Any]]:
    module = TracedDecoder(program.decoder).eval()
    prefill = trace(module, program.decoder, program.info, None).module(check_guards=True)
    decodes = {width: trace(module, program.decoder, program.info, width).module() for width in (1, 4)}
    return prefill, decodes


def metadata_of(program: Program, min_prefill_tokens: int = M) -> ProgramMetadata:
    info, config = program.info, program.decoder.config
    return ProgramMetadata(
        format=1,
        name="tiny",
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        context=info.context,
        max_prefill_tokens=W,
        min_prefill_tokens=min_prefill_tokens,
        widths=(1, 4),
        cells=None,
        num_layers=info.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        windows=config.windows,
        dtype="float32",
        quantization="none",
        device="cpu",
        platform=(),
        torch="0",
        source_sha256="",
        weight_bytes=0,
        weights={},
    )


@pytest.fixture
def traced(program: Program, graphs: tuple[Any, dict[int, Any]]) -> Traced:
    return Traced(program, metadata_of(program), *graphs)


def batch_of(*lengths: int) -> Batch:
    """Fresh sequences of these lengths, in scattered cells."""
    chunks, first = [], 0
    for number, length in enumerate(lengths):
        cells = [(7 * cell) % NUM_CELLS for cell in range(first, first + length)]
        chunks.append(chunk(PROMPT[:length], cells, sequence_id=number))
        first += length
    batch = cut(chunks, Slice(0, sum(lengths), Method.PREFILL), wanted=lambda index: True)
    assert batch is not None
    return batch


@pytest.mark.parametrize("wanted", [[], [7], [0, 3, 6, 7], [0, 1, 2, 3, 4], [0, 1, 2, 4, 5, 7]])
def test_a_prefill_selects_at_least_m_rows_repeating_the_last(traced: Traced, wanted: list[int]) -> None:
    traced.compare(batch_of(5, 3), Method.PREFILL, wanted)
    ((tokens, selector),) = traced.prefill.calls
    assert len(tokens) == 8
    filled = wanted or [7]
    assert selector == filled + [filled[-1]] * (M - len(filled))


def test_a_prefill_of_exactly_m_tokens_is_one_forward(traced: Traced) -> None:
    traced.compare(batch_of(3, 2), Method.PREFILL, [2, 4])
    assert len(traced.prefill.calls) == 1


@pytest.mark.parametrize("wanted", [[], [3], [0, 1, 2, 3]])
def test_a_prefill_narrower_than_m_runs_as_that_many_decodes(traced: Traced, wanted: list[int]) -> None:
    traced.compare(batch_of(4), Method.PREFILL, wanted)
    assert traced.prefill.calls == []
    assert [tokens for tokens, _ in traced.decodes[1].calls] == [[token] for token in PROMPT[:4]]


def test_decodes_are_padded_to_the_narrowest_width_that_holds_them(traced: Traced) -> None:
    traced.compare(batch_of(1), Method.DECODE, [0])
    traced.compare(batch_of(1, 1, 1), Method.DECODE, [0, 2])
    assert traced.decodes[1].calls == [([5], [0])]
    assert traced.decodes[4].calls == [([5, 5, 5, 0], [0, 2, 2, 2])]


def test_decodes_without_a_method_of_their_width_run_by_the_prefill(traced: Traced) -> None:
    methods = Methods(traced.decodes, traced.prefill)
    ladder = decode_ladder(traced.metadata, methods, (1, 2, 3, 4, 6, 8, 16))
    assert {width: method is traced.prefill for width, method in ladder.items()} == {
        1: False,
        4: False,
        6: True,
        8: True,
    }
    traced.forwards = ProgramForwards(traced.metadata, traced.pool, ladder, traced.prefill)
    traced.compare(batch_of(1, 1, 1, 1, 1), Method.DECODE, [0, 4])
    assert traced.prefill.calls == [([5, 5, 5, 5, 5, 0], [0, 4, 4, 4, 4, 4])]


class OneBuffer:
    """Stands in for captured methods: answers in one buffer that every run fills anew, of no more than `most` cells."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.buffer = torch.zeros((8, 3))
        self.runs: list[Method] = []

    def decode(self, rows: Rows, selector: Sequence[int]) -> Tensor | None:
        return self._run(Method.DECODE, rows, len(rows.spans))

    def prefill(self, rows: Rows, selector: Sequence[int]) -> Tensor | None:
        return self._run(Method.PREFILL, rows, len(selector))

    def _run(self, method: Method, rows: Rows, num_rows: int) -> Tensor | None:
        if sum(len(span.cells) for span in rows.spans) > self.most:
            return None
        self.runs.append(method)
        self.buffer[:] = len(self.runs)
        return self.buffer[:num_rows]


def test_what_captured_decodes_gave_is_kept_until_the_forward_is_whole(program: Program, traced: Traced) -> None:
    captured = OneBuffer(most=100)
    forwards = ProgramForwards(metadata_of(program), traced.pool, traced.decodes, traced.prefill, captured)
    assert forwards.run(batch_of(4), Method.PREFILL, [0, 1, 2, 3]).rows([0, 1, 2, 3])[:, 0].tolist() == [1, 2, 3, 4]
    assert forwards.num_beats == 4


def test_forwards_of_more_cells_than_captured_ones_read_are_launched(program: Program, traced: Traced) -> None:
    captured = OneBuffer(most=3)
    forwards = ProgramForwards(metadata_of(program), traced.pool, traced.decodes, traced.prefill, captured)
    with torch.inference_mode():
        forwards.run(batch_of(1, 1), Method.DECODE, [0])  # padded to four
        forwards.run(batch_of(5), Method.PREFILL, [0])
    assert (captured.runs, len(traced.decodes[4].calls), len(traced.prefill.calls)) == ([], 1, 1)
    captured.most = 5
    with torch.inference_mode():
        forwards.run(batch_of(1), Method.DECODE, [0])
        forwards.run(batch_of(5), Method.PREFILL, [0])
    assert (captured.runs, len(traced.prefill.calls)) == ([Method.DECODE, Method.PREFILL], 1)
    assert forwards.num_beats == 4


def test_padding_writes_to_no_cell_that_somebody_may_own(traced: Traced) -> None:
    traced.pool.keys[:, :NUM_CELLS] = 7.0
    with torch.inference_mode():
        traced.forwards.run(batch_of(1, 1, 1), Method.DECODE, [0])
    touched = (traced.pool.keys[:, :NUM_CELLS] != 7.0).flatten(2).any(dim=(0, 2)).nonzero().flatten().tolist()
    assert touched == [0, 7, 14]


def test_whole_prompts_give_the_tokens_of_the_eager_model(program: Program, traced: Traced) -> None:
    executor = TorchExecutor(program.info, traced.forwards)
    (answer,) = run_step(executor, [chunk(PROMPT, range(8))])
    (expected,) = run_step(executor_of(program, NUM_CELLS), [chunk(PROMPT, range(8))])
    assert token_of(answer) == token_of(expected)


def test_bounds_that_meet_are_one_static_width(program: Program) -> None:
    info = replace(program.info, min_prefill_tokens=W)
    module = TracedDecoder(program.decoder).eval()
    graph = trace(module, program.decoder, info, None).module()
    traced = Traced(program, metadata_of(program, min_prefill_tokens=W), graph, {})
    traced.compare(batch_of(5, 3), Method.PREFILL, [4, 7])
    assert traced.prefill.calls[0][1] == [4, *[7] * 7]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_are_traced_as_the_plain_tensors_that_they_consist_of(
    tmp_path: Path, quantization: Quantization
) -> None:
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 96})
    program = load(str(tmp_path), max_prefill_tokens=W, quantization=quantization)
    module = TracedDecoder(program.decoder).eval()
    assert any(buffer.dtype in (torch.int8, torch.uint8) for _, buffer in module.named_buffers())
    prefill = trace(module, program.decoder, program.info, None).module()
    decode = trace(module, program.decoder, program.info, 1).module()
    traced = Traced(program, metadata_of(program), prefill, {1: decode})
    traced.compare(batch_of(5, 3), Method.PREFILL, [4, 7])
    traced.compare(batch_of(3), Method.PREFILL, [2])


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_gpus_matrices_are_traced_as_codes_and_scales(tmp_path: Path, quantization: Quantization) -> None:
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 96})
    program = load(str(tmp_path), max_prefill_tokens=W, min_prefill_tokens=M)
    decoder = program.decoder
    weights = fp8_weights(decoder.weights) if quantization == "fp8" else pack_weights(decoder.weights, quantization)
    packed = Decoder(decoder.config, weights, decoder.context)
    program = replace(program, decoder=packed)
    module = TracedDecoder(packed).eval()
    assert any(name.endswith("qkv__codes") for name, _ in module.named_buffers())
    prefill = trace(module, packed, program.info, None).module()
    decode = trace(module, packed, program.info, 1).module()
    traced = Traced(program, metadata_of(program), prefill, {1: decode})
    traced.compare(batch_of(5, 3), Method.PREFILL, [4, 7])
    traced.compare(batch_of(3), Method.PREFILL, [2])


def test_a_program_of_quantized_layers_names_the_weights_that_it_was_made_of(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 96})

    def source(quantization: Quantization) -> ExportSource:
        config = EngineConfig(model=str(tmp_path), device="cpu", quantization=quantization, min_prefill_tokens=5)
        return load_source(config, (1,), {})

    plain, quantized = source("none"), source("int8")
    assert quantized.source_sha256 == plain.source_sha256
    assert quantized.info.weight_bytes < plain.info.weight_bytes
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 112})
    assert source("int8").source_sha256 != plain.source_sha256
