"""The torch executor by single steps: cut chunks, failures that stay with their own, and log probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planner.errors import ForwardFailed, GrammarFailed, InvalidConfiguration
from planner.request import SamplingParams
from planner.slices import Method, Slice
from planner.step import ChunkOutput
from tests.tiny_models import greedy_answer, save_tiny_model
from tests.torch_rig import chunk, executor_of, load, run_step, token_of
from worker.batch import Batch, cut, selector
from worker.config import EngineConfig
from worker.executor import limits_for
from worker.forwards import EagerForwards, SelectedLogits
from worker.kv_pool import KvPool
from worker.masks import BitMask, ConstrainedRow, NoMasks
from worker.program import Program, build_executor
from worker.torch_executor import TorchExecutor

PROMPT = [5, 17, 3, 80, 41, 9, 66, 2, 33, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_tiny_model("llama", folder)


@pytest.fixture(scope="module")
def program(folder: Path, model: Any) -> Program:
    return load(str(folder))


def prefill(offset: int, length: int) -> Slice:
    return Slice(offset, length, Method.PREFILL)


def test_a_chunk_cut_by_slices_gives_what_it_gives_whole(program: Program, model: Any) -> None:
    executor = executor_of(program, 64)
    mate = chunk([1, 2, 3, 4], range(20, 24), sequence_id=2)
    whole = run_step(executor, [mate, chunk(PROMPT, range(10))])
    parts = [prefill(0, 6), prefill(6, 7), Slice(13, 1, Method.DECODE)]
    pieces = run_step(executor_of(program, 64), [mate, chunk(PROMPT, range(10))], parts)
    assert pieces == whole
    assert token_of(whole[1]) == greedy_answer(model, PROMPT, 1)[0]


def test_a_step_beats_with_every_layer_of_every_slice(program: Program) -> None:
    executor = executor_of(program, 64)
    run_step(executor, [chunk(PROMPT, range(10))], [prefill(0, 6), prefill(6, 4)])
    assert executor.num_beats == 2 * program.info.num_layers + 1  # only the last slice has logits


def test_a_chunk_goes_on_where_the_one_before_ended(program: Program, model: Any) -> None:
    executor = executor_of(program, 64)
    cells = [9, 3, 40, 7, 8, 11, 60, 2, 5, 1]
    (first,) = run_step(executor, [chunk(PROMPT[:4], cells[:4], samples=False)])
    assert first == ChunkOutput()
    (second,) = run_step(executor, [chunk(PROMPT[4:], cells, start=4)])
    assert token_of(second) == greedy_answer(model, PROMPT, 1)[0]


def test_two_swapped_cells_change_the_answer(program: Program) -> None:
    """The comparisons of this suite can fail: a cell of one sequence in the list of another is seen in its logits."""

    def logprob(cells: Sequence[int]) -> float:
        executor = executor_of(program, 64)
        other = chunk(PROMPT[::-1], range(20, 30), sequence_id=2)
        run_step(executor, [chunk(PROMPT, range(10)), other])
        (outcome,) = run_step(
            executor, [chunk([4], [*cells, 10], start=10, sampling=SamplingParams(temperature=0.0, logprobs=0))]
        )
        return float(outcome.logprobs.logprob)

    right = logprob(range(10))
    assert logprob([0, 1, 22, 3, 4, 5, 6, 7, 8, 9]) != pytest.approx(right, abs=1e-3)
    # The order of whole cells is of no consequence: their keys carry their positions.
    assert logprob([9, 1, 2, 3, 4, 5, 6, 7, 8, 0]) == pytest.approx(right, abs=1e-4)


def test_nan_ends_only_the_sequence_that_has_it(program: Program, model: Any) -> None:
    info, decoder = program.info, program.decoder
    pool = KvPool(info.num_layers, 64, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    executor = TorchExecutor(info, EagerForwards(decoder, pool))
    run_step(executor, [chunk(PROMPT[:-1], range(9)), chunk(PROMPT[:-1], range(20, 29), sequence_id=2)])
    pool.values[1, 3] = torch.nan
    last = PROMPT[-1:]
    sick, well = run_step(
        executor, [chunk(last, range(10), start=9), chunk(last, range(20, 30), start=9, sequence_id=2)]
    )
    assert isinstance(sick, ForwardFailed)
    assert token_of(well) == greedy_answer(model, PROMPT, 1)[0]


def test_a_forward_that_raises_ends_its_own_chunks_and_no_others(program: Program, model: Any) -> None:
    executor = executor_of(program, 64)
    impossible = [1, 2, 97, 4]  # the vocabulary ends at 96
    chunks = [
        chunk(impossible, range(4)),
        chunk([7, 8], range(10, 12), sequence_id=2),
        chunk(PROMPT, range(20, 30), sequence_id=3),
    ]
    outcomes = run_step(executor, chunks, [prefill(0, 5), prefill(5, 11)])
    assert isinstance(outcomes[0], ForwardFailed)
    assert isinstance(outcomes[1], ForwardFailed)  # its first token shared the forward that failed
    assert token_of(outcomes[2]) == greedy_answer(model, PROMPT, 1)[0]
    assert run_step(executor, [chunk(PROMPT, range(10))])[0] == outcomes[2]


def test_a_fault_of_the_device_itself_is_the_executors_end(program: Program) -> None:
    class Faulty(EagerForwards):
        def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
            raise torch.AcceleratorError("an illegal memory access was encountered")

    info, decoder = program.info, program.decoder
    pool = KvPool(info.num_layers, 64, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    with pytest.raises(torch.AcceleratorError):
        run_step(TorchExecutor(info, Faulty(decoder, pool)), [chunk(PROMPT, range(10))])


def test_masks_of_a_forward_that_failed_are_done_when_the_step_is(program: Program) -> None:
    class Slow(NoMasks):
        num_made = 0

        def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
            time.sleep(0.2)
            self.num_made += len(rows)
            return super().masks(rows)

    class Faulty(EagerForwards):
        def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
            raise RuntimeError("no room")

    info, decoder, slow = program.info, program.decoder, Slow()
    pool = KvPool(info.num_layers, 64, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    executor = TorchExecutor(info, Faulty(decoder, pool), grammars=slow)
    asked = chunk(PROMPT, range(10), sampling=SamplingParams(grammar="any"))._replace(history=np.array(PROMPT))
    (outcome,) = run_step(executor, [asked])
    assert isinstance(outcome, ForwardFailed)
    assert slow.num_made == 1


def test_what_a_grammar_forces_is_told_with_the_token_that_it_follows(program: Program) -> None:
    class Only(NoMasks):
        """Token 7, and then 8 and 9."""

        num_asked = 0

        def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
            only = np.arange(program.info.vocab_size) == 7
            return [np.packbits(only, bitorder="little") for _ in rows]

        def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
            self.num_asked += len(rows)
            return [(7, 8, 9) if row.grammar == "short" else (6, 8) for row in rows]

    info, decoder = program.info, program.decoder
    pool = KvPool(info.num_layers, 64, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    grammars = Only()
    executor = TorchExecutor(info, EagerForwards(decoder, pool), grammars=grammars)

    def outcome(sampling: SamplingParams) -> ChunkOutput:
        asked = chunk(PROMPT, range(10), sampling=sampling)._replace(history=np.array(PROMPT))
        (outcome,) = run_step(executor, [asked])
        assert isinstance(outcome, ChunkOutput)
        assert outcome.token == 7
        return outcome

    assert outcome(SamplingParams(grammar="short")).forced == (8, 9)
    assert outcome(SamplingParams(grammar="other")).forced == (), "it would not follow what was drawn"
    assert grammars.num_asked == 2
    assert outcome(SamplingParams(grammar="short", logprobs=0)).forced == (), "each token wants a draw"
    assert outcome(SamplingParams(grammar="short", bad_words=((7, 8),))).forced == (), "it may be one"
    assert grammars.num_asked == 2


def test_logprobs_of_prompt_and_token_equal_those_of_transformers(program: Program, model: Any) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    targets = np.array(PROMPT[1:])
    scored = chunk(PROMPT, range(10), sampling=sampling, prompt_targets=targets)
    (outcome,) = run_step(executor_of(program, 64), [scored], [prefill(0, 4), prefill(4, 6)])
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [entry.token for entry in outcome.prompt_logprobs] == PROMPT[1:]
    for row, entry in enumerate(outcome.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(expected[row, PROMPT[row + 1]]), abs=1e-4)
        assert [token for token, _ in entry.top] == expected[row].topk(2).indices.tolist()
    assert outcome.logprobs.token == outcome.token == int(expected[-1].argmax())
    assert outcome.logprobs.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_long_prompts_are_scored_in_blocks(program: Program) -> None:
    prompt = np.random.default_rng(0).integers(0, 97, size=150)
    scored = chunk(prompt.tolist(), range(150), prompt_targets=prompt[1:], samples=False)
    (outcome,) = run_step(executor_of(program, 200), [scored])
    assert [entry.token for entry in outcome.prompt_logprobs] == prompt[1:].tolist()
    assert outcome.token is None


def test_selector_of_a_prefill_repeats_its_last_row() -> None:
    assert selector([2, 5], Method.PREFILL, 5) == [2, 5, 5, 5, 5]
    assert selector([1, 2, 3, 4, 5, 6], Method.PREFILL, 5) == [1, 2, 3, 4, 5, 6]
    assert selector([0], Method.DECODE, 5) == [0]
    assert selector([], Method.PREFILL, 5) == []


def test_a_batch_leaves_out_chunks_that_failed() -> None:
    chunks = [chunk([1, 2], range(2)), chunk([3, 4, 5], range(4, 8), start=1), chunk([6], [9])]
    batch = cut(chunks, prefill(1, 4), wanted=lambda index: index != 0)
    assert batch is not None
    assert batch.tokens.tolist() == [3, 4, 5]
    assert batch.positions.tolist() == [1, 2, 3]
    assert [piece.sampled_row for piece in batch.pieces] == [2]
    assert cut(chunks, prefill(0, 2), wanted=lambda index: index != 0) is None


def test_what_is_built_agrees_with_its_limits(folder: Path, model: Any) -> None:
    config = EngineConfig(model=str(folder), device="cpu", num_threads=1, max_cells=77, min_prefill_tokens=5)
    executor = build_executor(config)
    limits = limits_for(config, executor.info, executor.max_steps_in_flight)
    assert (limits.capacity, limits.context, limits.vocab_size) == (77, 256, 97)
    assert (limits.min_prefill_tokens, limits.widths[-1]) == (5, 128)
    assert executor.info.bytes_per_cell == 2 * 3 * 2 * 16 * 4
    executor.close()
    assert build_executor(config.model_copy(update={"max_cells": None})).info.num_cells == 8 * 256


def test_a_gpu_that_is_not_there_is_a_fault_of_the_configuration(folder: Path, model: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InvalidConfiguration, match="CUDA"):
        build_executor(EngineConfig(model=str(folder), device="cuda"))
