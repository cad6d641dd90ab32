"""Captured decodes of a program's methods: one set of buffers for whatever sequences there are, against the oracle.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), where a decode runs eagerly in place of a captured one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from planner.slices import Method, Slice
from tests.cuda_rig import DEVICE, INTERPRETED, Model, tiny_model
from tests.torch_rig import chunk
from worker.attention import TorchAttention
from worker.attention_op import distinct_windows
from worker.batch import Batch, cut
from worker.cuda.packed_attention import update_and_attend_on_gpu
from worker.forwards import EagerForwards, SelectedLogits, spans_of
from worker.kv_pool import KvPool
from worker.packed_plan import PackedPlan
from worker.programs.captured import CapturedDecodes
from worker.programs.forwards import CompiledMethod, ProgramForwards
from worker.programs.metadata import ProgramMetadata
from worker.programs.on_gpu import chunk_lengths, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
NUM_CELLS, WIDTHS = 160, (1, 2, 4)
# (first cell, positions before the new token) of a sequence in strided cells.
SEQUENCES = ((0, 0), (1, 12), (2, 30), (3, 5))


class DecoderMethod:
    """A method as the compiler leaves it, but for the compiling: its plans reach the GPU's kernels as they are."""

    def __init__(self, model: Model) -> None:
        self._decoder = model.decoder

    def __call__(
        self, tokens: Tensor, positions: Tensor, selector: Tensor, keys: Tensor, values: Tensor, *plans: list[Tensor]
    ) -> Tensor:
        windows = self._decoder.config.windows
        by_window = dict(zip(distinct_windows(windows), zip(*plans, strict=True), strict=True))

        class Attention:
            def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                packed = PackedPlan(*by_window[windows[layer]])
                return update_and_attend_on_gpu(query, key, value, keys[layer], values[layer], packed, windows[layer])

        hidden = self._decoder.hidden(tokens, positions, Attention())
        return self._decoder.logits(hidden.index_select(0, selector))


class Rig:
    """A program whose decodes are captured, and the oracle, each over a pool with the same history."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.pools = [model.pool(NUM_CELLS) for _ in range(2)]
        torch.manual_seed(3)
        for side in ("keys", "values"):
            history = torch.randn_like(self.pools[0].keys)
            for pool in self.pools:
                getattr(pool, side).copy_(history)
        method: CompiledMethod = DecoderMethod(model)
        decodes = dict.fromkeys(WIDTHS, method)
        num_plans = len(distinct_windows(model.decoder.config.windows))
        self.captured = CapturedDecodes(
            decodes, self.pools[0], vocab_size=model.decoder.config.vocab_size, num_plans=num_plans,
            capture=(lambda forward: forward) if INTERPRETED else None, **settings,
        )  # fmt: skip
        self.program = ProgramForwards(metadata_of(model), self.pools[0], decodes, method, self.captured)
        self.oracle = EagerForwards(model.decoder, self.pools[1], oracle_attention)

    def compare(self, chosen: Sequence[int], wanted: Sequence[int]) -> None:
        batch = decode_of(chosen)
        with torch.inference_mode():
            ours = self.program.run(batch, Method.DECODE, wanted).rows(wanted)
            theirs = self.oracle.run(batch, Method.DECODE, wanted).rows(wanted)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for side in ("keys", "values"):  # all cells but the scratch cell
            sides = [getattr(pool, side)[:, :NUM_CELLS] for pool in self.pools]
            torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-4)


def oracle_attention(pool: KvPool, spans: Any, windows: Any, num_heads: int) -> TorchAttention:
    return TorchAttention(pool, spans, windows)


def decode_of(chosen: Sequence[int]) -> Batch:
    chunks = []
    for number in chosen:
        first, start = SEQUENCES[number]
        cells = range(first, NUM_CELLS, len(SEQUENCES))[: start + 1]
        chunks.append(chunk([11 + number], list(cells), start=start, sequence_id=number))
    batch = cut(chunks, Slice(0, len(chunks), Method.DECODE), wanted=lambda index: True)
    assert batch is not None
    return batch


def metadata_of(model: Model) -> ProgramMetadata:
    config = model.decoder.config
    return ProgramMetadata(
        format=1, name="tiny", architecture=config.architecture, vocab_size=config.vocab_size, context=config.context,
        max_prefill_tokens=8, min_prefill_tokens=2, widths=WIDTHS, cells=None, num_layers=config.num_layers,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, windows=config.windows,
        dtype="float32", quantization="none", device="cuda", platform=(), torch="0", source_sha256="", weight_bytes=0,
        weights={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("mistral")  # a window in one layer, none in the other


def test_captured_decodes_give_what_the_oracle_gives_whatever_ran_before(model: Model) -> None:
    rig = Rig(model)
    for chosen, wanted in (((0, 1, 2), (0, 1, 2)), ((2,), (0,)), ((3, 2), (1,)), ((1, 3, 0, 2), (0, 3)), ((0,), ())):
        rig.compare(chosen, wanted)


def test_a_list_of_cells_that_is_just_full_is_taken_and_a_longer_one_is_not(model: Model) -> None:
    rig = Rig(model, max_cells=44)
    exact, longer = decode_of((1, 2)), decode_of((0, 1, 2))
    assert [rig.captured.takes(spans_of(batch)) for batch in (exact, longer)] == [True, False]
    rig.compare((1, 2), (0, 1))


def test_logits_of_a_token_at_another_position_are_found_out(model: Model) -> None:
    rig = Rig(model)
    ours, others = decode_of((2,)), decode_of((1,))
    with torch.inference_mode():
        first = rig.program.run(ours, Method.DECODE, [0]).rows([0]).clone()
        second = rig.program.run(others, Method.DECODE, [0]).rows([0])
    assert not np.allclose(first.cpu(), second.cpu(), atol=1e-2)


class Noted:
    """Forwards that note how many tokens they are given, by which method, and how many rows are wanted."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, Method, int]] = []

    @property
    def num_beats(self) -> int:
        return len(self.runs)

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        self.runs.append((len(batch.tokens), method, len(wanted)))
        assert all(max(piece.chunk.cells) < 100 for piece in batch.pieces)
        return AnyLogits()


class AnyLogits:
    def rows(self, rows: Sequence[int]) -> Tensor:
        return torch.zeros((len(rows), 9), device=DEVICE)

    def normed(self, first: int, end: int) -> Tensor:
        raise AssertionError("nobody asks for vectors here")


def test_the_start_runs_the_widest_prefill_with_the_logits_of_every_row(model: Model) -> None:
    noted, info = Noted(), model.info(100, (1, 2, 4), max_prefill_tokens=128)
    warm_up(noted, info, 100)
    assert noted.runs[0] == (100, Method.PREFILL, 100), "no more cells than there are"
    assert noted.runs[1:] == [
        (1, Method.DECODE, 1),
        *((width, Method.PREFILL, width) for width in (2, 4, 8, 16, 32, 64)),
    ]


@pytest.mark.parametrize(
    ("num_tokens", "context", "lengths"),
    [
        (1, 256, [1]),
        (88, 256, [88]),
        (100, 256, [1, 3, 40, 56]),
        (600, 256, [1, 3, 40, 256, 256, 44]),
        (90, 30, [1, 3, 30, 30, 26]),
    ],
)
def test_warm_up_has_chunks_of_every_size_that_fit_into_a_context(
    num_tokens: int, context: int, lengths: list[int]
) -> None:
    assert chunk_lengths(num_tokens, context) == lengths
