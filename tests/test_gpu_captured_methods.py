"""Captured methods of a program: one set of buffers for whatever sequences there are, against the oracle.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), where a method runs eagerly in place of a captured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from worker.programs.captured import CapturedMethods
from worker.programs.forwards import CompiledMethod, Methods, ProgramForwards, Rows, padded
from worker.programs.metadata import ProgramMetadata
from worker.programs.on_gpu import chunk_lengths, warm_up
from worker.sampler import Draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
NUM_CELLS, WIDTHS = 160, (1, 2, 4)
# By number of tokens the number of rows.
PREFILLS = {8: 2, 16: 4}
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
    """A program whose methods are captured, and the oracle, each over a pool with the same history."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.pools = [model.pool(NUM_CELLS) for _ in range(2)]
        torch.manual_seed(3)
        for side in ("keys", "values"):
            history = torch.randn_like(self.pools[0].keys)
            for pool in self.pools:
                getattr(pool, side).copy_(history)
        method: CompiledMethod = DecoderMethod(model)
        methods, config = Methods(dict.fromkeys(WIDTHS, method), method), model.decoder.config
        self.captured = CapturedMethods(
            methods, self.pools[0], prefills=PREFILLS, vocab_size=config.vocab_size,
            num_plans=len(distinct_windows(config.windows)), shared_heads=config.num_heads // config.num_kv_heads,
            capture=(lambda forward: forward) if INTERPRETED else None, **settings,
        )  # fmt: skip
        self.program = ProgramForwards(metadata_of(model), self.pools[0], methods.decodes, method, self.captured)
        self.oracle = EagerForwards(model.decoder, self.pools[1], oracle_attention)

    def compare(self, batch: Batch, method: Method, wanted: Sequence[int]) -> None:
        with torch.inference_mode():
            ours = self.program.run(batch, method, wanted).rows(wanted)
            theirs = self.oracle.run(batch, method, wanted).rows(wanted)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for side in ("keys", "values"):  # all cells but the scratch cell
            sides = [getattr(pool, side)[:, :NUM_CELLS] for pool in self.pools]
            torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-4)


def oracle_attention(pool: KvPool, spans: Any, windows: Any, num_heads: int) -> TorchAttention:
    return TorchAttention(pool, spans, windows)


def batch_of(chosen: Mapping[int, int], method: Method) -> Batch:
    """So many tokens of each chosen sequence."""
    chunks = []
    for number, length in chosen.items():
        first, start = SEQUENCES[number]
        cells = range(first, NUM_CELLS, len(SEQUENCES))[: start + length]
        tokens = [11 + number + 5 * place for place in range(length)]
        chunks.append(chunk(tokens, list(cells), start=start, sequence_id=number))
    batch = cut(chunks, Slice(0, sum(chosen.values()), method), wanted=lambda index: True)
    assert batch is not None
    return batch


def decode_of(*chosen: int) -> Batch:
    return batch_of(dict.fromkeys(chosen, 1), Method.DECODE)


def metadata_of(model: Model) -> ProgramMetadata:
    config = model.decoder.config
    return ProgramMetadata(
        format=1, name="tiny", architecture=config.architecture, vocab_size=config.vocab_size, context=config.context,
        max_prefill_tokens=16, min_prefill_tokens=2, widths=WIDTHS, cells=None, num_layers=config.num_layers,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, windows=config.windows,
        dtype="float32", quantization="none", device="cuda", platform=(), torch="0", source_sha256="", weight_bytes=0,
        weights={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("mistral")  # a window in one layer, none in the other


def test_captured_methods_give_what_the_oracle_gives_whatever_ran_before(model: Model) -> None:
    rig = Rig(model)
    decodes = (((0, 1, 2), (0, 1, 2)), ((2,), (0,)), ((3, 2), (1,)), ((1, 3, 0, 2), (0, 3)))
    prefills = (({0: 5, 1: 1}, (4, 5)), ({2: 3}, (0, 2)), ({1: 1, 3: 9, 0: 2}, (9, 11)), ({0: 16}, (15,)))
    for (chosen, wanted), (lengths, of_prefill) in zip(decodes, prefills, strict=True):
        rig.compare(decode_of(*chosen), Method.DECODE, wanted)
        rig.compare(batch_of(lengths, Method.PREFILL), Method.PREFILL, of_prefill)


def test_a_list_of_cells_that_is_just_full_is_taken_and_a_longer_one_is_not(model: Model) -> None:
    captured = Rig(model, max_cells=44).captured
    with torch.inference_mode():
        exact, longer = rows_of(decode_of(1, 2)), rows_of(decode_of(0, 1, 2))
        assert captured.decode(exact, [0, 1]) is not None
        assert captured.decode(padded(longer, 4, NUM_CELLS), [0, 1, 2, 2]) is None
        assert captured.prefill(exact, [0, 1]) is not None
        assert captured.prefill(longer, [0, 1]) is None


def test_a_prefill_that_is_too_wide_or_gives_too_many_rows_is_not_captured(model: Model) -> None:
    captured = Rig(model).captured
    with torch.inference_mode():
        widest = rows_of(batch_of({0: 16}, Method.PREFILL))
        assert captured.prefill(widest, [15, 15]) is not None
        assert captured.prefill(widest, list(range(12, 16))) is not None
        assert captured.prefill(widest, list(range(11, 16))) is None
        assert captured.prefill(rows_of(batch_of({0: 17}, Method.PREFILL)), [16, 16]) is None
        # Three rows are more than the narrower one gives.
        assert captured.prefill(rows_of(batch_of({0: 3}, Method.PREFILL)), [0, 1, 2]) is not None


def rows_of(batch: Batch) -> Rows:
    return Rows(batch.tokens, batch.positions, tuple(spans_of(batch)))


def test_logits_of_a_token_at_another_position_are_found_out(model: Model) -> None:
    rig = Rig(model)
    with torch.inference_mode():
        first = rig.program.run(decode_of(2), Method.DECODE, [0]).rows([0]).clone()
        second = rig.program.run(decode_of(1), Method.DECODE, [0]).rows([0])
    assert not np.allclose(first.cpu(), second.cpu(), atol=1e-2)


class Noted:
    """Forwards that note how many tokens they are given, by which method, and how many rows are wanted."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, Method, int]] = []
        self.draws: list[int] = []

    @property
    def num_beats(self) -> int:
        return len(self.runs)

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        self.runs.append((len(batch.tokens), method, len(wanted)))
        assert all(max(piece.chunk.cells) < 100 for piece in batch.pieces)
        return AnyLogits()

    def draw_rows(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        assert len(logits) == len(draws)
        self.draws.append(len(draws))
        return logits.argmax(dim=-1)


class AnyLogits:
    def rows(self, rows: Sequence[int]) -> Tensor:
        return torch.zeros((len(rows), 9), device=DEVICE)

    def normed(self, first: int, end: int) -> Tensor:
        raise AssertionError("nobody asks for vectors here")


def test_the_start_runs_the_widest_prefill_with_the_logits_of_every_row(model: Model) -> None:
    noted, info = Noted(), model.info(100, (1, 2, 4), max_prefill_tokens=128)
    warm_up(noted, noted.draw_rows, info, 100)
    assert max(noted.draws) == 4, "as many as the widest decode has"
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
