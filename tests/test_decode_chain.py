"""The decode chain's kernels on tiny models, against the float32 reference. Runs on a GPU, or without one under
Triton's interpreter (TRITON_INTERPRET=1), which finds wrong indices and wrong arithmetic but no races."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from tests.decode_rig import Rig, relative_error  # noqa: E402
from worker.cuda.decode_plan import AttentionTile, Chain, DecodePlan  # noqa: E402
from worker.cuda.decode_shape import DecodeShape  # noqa: E402
from worker.cuda.tiles import GemvTile, GemvTiles, LinearTile, LinearTiles  # noqa: E402

if INTERPRETED:
    # The interpreter turns arrays of one element into numbers, which NumPy 2 deprecates.
    pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

LLAMA = DecodeShape(
    hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=128, vocab_size=203, context=64,
    norm_eps=1e-5, dtype=torch.float32, windows=(None,) * 2,
)  # fmt: skip
QWEN2 = DecodeShape(
    hidden=56, num_heads=7, num_kv_heads=1, head_dim=8, ffn=76, vocab_size=131, context=64,
    norm_eps=1e-6, dtype=torch.float32, windows=(None,) * 2, qkv_bias=True,
)  # fmt: skip
QWEN3 = DecodeShape(
    hidden=64, num_heads=4, num_kv_heads=4, head_dim=32, ffn=96, vocab_size=160, context=64,
    norm_eps=1e-6, dtype=torch.float32, windows=(None,) * 2, qk_norm=True,
)  # fmt: skip
MISTRAL = DecodeShape(
    hidden=80, num_heads=4, num_kv_heads=2, head_dim=20, ffn=112, vocab_size=97, context=64,
    norm_eps=1e-5, dtype=torch.float32, windows=(9, None),
)  # fmt: skip
BIASED = DecodeShape(
    hidden=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn=96, vocab_size=90, context=64, norm_eps=1e-5,
    dtype=torch.float32, windows=(None,), qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip

PACKED = DecodeShape(
    hidden=128, num_heads=4, num_kv_heads=1, head_dim=32, ffn=256, vocab_size=203, context=64,
    norm_eps=1e-5, dtype=torch.float32, windows=(None,), qkv_bias=True, quantization="int8",
)  # fmt: skip
PACKED4 = replace(PACKED, quantization="int4")

ONE_SPLIT = AttentionTile(splits=1, block=16, warps=1, stages=2)
SPLITS = AttentionTile(splits=4, block=16, warps=2, stages=1, share=16)
FIRST = AttentionTile(splits=4, block=32, warps=4, stages=1, share=8, first=True)
PIECES = AttentionTile(splits=1, block=16, warps=2, stages=2, share=16, pieces=6)
FEW_PIECES = AttentionTile(splits=1, block=32, warps=1, stages=1, share=16, pieces=1)


def library(attention: AttentionTile) -> DecodePlan:
    return DecodePlan(4, Chain.LIBRARY, attention)


def gemv(attention: AttentionTile) -> DecodePlan:
    tile = GemvTile(columns=4, depth=32, warps=2)
    return DecodePlan(1, Chain.GEMV, attention, gemv=GemvTiles(tile, tile, tile, tile, GemvTile(8, 64, 2)))


def split_k(attention: AttentionTile, *, swap: bool) -> DecodePlan:
    two = LinearTile(rows=16, columns=16, depth=16, splits=2, stages=2, warps=2, swap=swap)
    one = LinearTile(rows=16, columns=32, depth=32, splits=1, stages=2, warps=2, swap=swap)
    return DecodePlan(4, Chain.SPLIT_K, attention, linear=LinearTiles(two, two, one, two, one))


def packed_gemv(attention: AttentionTile) -> DecodePlan:
    part, whole = GemvTile(columns=8, depth=128, warps=1), GemvTile(columns=8, depth=512, warps=1)
    gate_up = GemvTile(columns=8, depth=128, warps=1)  # of either
    return DecodePlan(1, Chain.GEMV, attention, gemv=GemvTiles(part, whole, gate_up, part, GemvTile(8, 64, 2)))


def packed_split(attention: AttentionTile) -> DecodePlan:
    tile = LinearTile(rows=16, columns=64, depth=128, splits=1, stages=2, warps=4, swap=True)
    head = LinearTile(rows=16, columns=32, depth=32, splits=1, stages=2, warps=2, swap=True)
    return DecodePlan(4, Chain.SPLIT_K, attention, linear=LinearTiles(tile, tile, tile, replace(tile, splits=2), head))


CASES = {
    "library, one split": (LLAMA, library(ONE_SPLIT)),
    "library, splits": (LLAMA, library(SPLITS)),
    "library, down in parts": (LLAMA, replace(library(ONE_SPLIT), down_parts=2)),
    "library, down in parts, every bias": (BIASED, replace(library(ONE_SPLIT), down_parts=4)),
    "library, splits, first block": (LLAMA, library(FIRST)),
    "library, bias, odd sizes": (QWEN2, library(SPLITS)),
    "library, every bias": (BIASED, library(ONE_SPLIT)),
    "library, head norms": (QWEN3, library(FIRST)),
    "library, window, odd head": (MISTRAL, library(ONE_SPLIT)),
    "library, window, splits": (MISTRAL, library(SPLITS)),
    "library, window, first block": (MISTRAL, library(FIRST)),
    "library, pieces": (LLAMA, library(PIECES)),
    "library, few pieces, bias, odd sizes": (QWEN2, library(FEW_PIECES)),
    "library, window, pieces": (MISTRAL, library(PIECES)),
    "split k, pieces, head norms": (QWEN3, split_k(PIECES, swap=False)),
    "gemv": (LLAMA, gemv(FIRST)),
    "gemv, head norms": (QWEN3, gemv(SPLITS)),
    "split k": (LLAMA, split_k(SPLITS, swap=False)),
    "split k, weights first": (QWEN3, split_k(ONE_SPLIT, swap=True)),
    "library, eight bits": (PACKED, library(ONE_SPLIT)),
    "library, four bits": (PACKED4, library(ONE_SPLIT)),
    "split k, eight bits": (PACKED, packed_split(ONE_SPLIT)),
    "split k, four bits": (PACKED4, packed_split(SPLITS)),
    "gemv, eight bits": (PACKED, packed_gemv(SPLITS)),
    "gemv, four bits": (PACKED4, packed_gemv(FIRST)),
}


@pytest.mark.parametrize("name", CASES)
def test_chain_gives_what_float32_gives_over_three_steps_in_any_rows(name: str) -> None:
    shape, plan = CASES[name]
    lengths = [37] if plan.chain is Chain.GEMV else [0, 1, 16, 37]
    rig = Rig(shape, lengths, width=len(lengths), plan=plan, device=DEVICE)
    for step in range(3):
        order = rig.place_rows()
        expected = rig.reference_logits()
        rig.chain.run(rig.width, plan)
        drawn = rig.follow(order)
        assert drawn == [int(logits.argmax()) for logits in expected], step
        for index, history in enumerate(rig.histories):
            for (k, v), keys, values in zip(rig.newest(index), history.keys, history.values, strict=True):
                # Sums of integers take x as integers of 16 bits.
                tolerance = 1e-5 if shape.bits is None else 1e-4
                assert relative_error(k, keys[-1]) < tolerance
                assert relative_error(v, values[-1]) < tolerance


@pytest.mark.parametrize("plan", [library(ONE_SPLIT), gemv(FIRST), split_k(SPLITS, swap=True)])
def test_sampler_sees_the_logits_and_its_tokens_are_fed_back(plan: DecodePlan) -> None:
    lengths, width = ([20], 1) if plan.chain is Chain.GEMV else ([5, 12, 20], 4)
    rig = Rig(LLAMA, lengths, width, plan, DEVICE)
    order = rig.place_rows()
    expected = rig.reference_logits()
    seen = []

    def least_likely(logits: torch.Tensor, row_slots: torch.Tensor, state: object) -> None:
        seen.append(logits.clone())
        rig.state.out_tokens[: len(logits)] = logits.argmin(-1)

    rig.chain.run(width, plan, least_likely)
    for row, index in enumerate(order):
        assert relative_error(seen[0][row], expected[index]) < 1e-5
    drawn = rig.follow(order)
    assert drawn == [int(logits.argmin()) for logits in expected]
    assert [int(rig.state.last_token[slot]) for slot in rig.slots] == drawn
    assert [int(rig.state.length[slot]) for slot in rig.slots] == [length + 1 for length in lengths]


@pytest.mark.parametrize("plan", [library(SPLITS), split_k(PIECES, swap=False)])
def test_padding_rows_touch_only_scratch(plan: DecodePlan) -> None:
    rig = Rig(LLAMA, lengths=[3, 18], width=4, plan=plan, device=DEVICE)
    state = rig.state
    idle = [slot for slot in range(state.num_slots) if slot not in rig.slots]
    state.last_token[idle], state.length[idle], state.table[idle] = 11, 5, 1
    pool_before = [tensor.clone() for pair in rig.pool for tensor in pair]
    order = rig.place_rows()
    rig.chain.run(4, plan)
    rig.follow(order)
    assert int(state.length[state.scratch_slot]) == 0
    assert state.last_token[idle].tolist() == [11, 11]
    assert state.length[idle].tolist() == [5, 5]
    assert bool((state.table[idle] == 1).all())
    written = {cells[-1] for cells in rig.cells} | {state.scratch_cell}
    untouched = [cell for cell in range(state.scratch_cell) if cell not in written]
    after = [tensor for pair in rig.pool for tensor in pair]
    for before, now in zip(pool_before, after, strict=True):
        assert torch.equal(before[untouched].nan_to_num(7.0), now[untouched].nan_to_num(7.0))
    assert int(rig.buffers.arrived.abs().sum()) == 0


@pytest.mark.parametrize(
    ("lengths", "pieces", "share", "expected"),
    [
        ([0, 1, 16, 37], 100, 16, [1, 1, 1, 3]),  # no share is below 16 cells
        ([60, 10, 10, 10], 4, 16, [2, 1, 1, 1]),  # 90 cells over 4 pieces are 23 each, so 32
        ([60, 60], 1, 16, [1, 1]),  # every row has a piece
        ([48, 48], 6, 32, [2, 2]),
    ],
)
def test_pieces_are_even_and_the_largest_come_first(
    lengths: list[int], pieces: int, share: int, expected: list[int]
) -> None:
    """Rows of padding have none, whatever lies in the list from before."""
    tile = AttentionTile(splits=1, block=16, warps=1, stages=1, share=share, pieces=pieces)
    rig = Rig(LLAMA, lengths, width=len(lengths) + 1, plan=library(tile), device=DEVICE)
    rig.buffers.work.fill_(-5)
    order = rig.place_rows()
    rig.chain._embed(rig.width, rig.plan, scaled=False)
    number = int(rig.buffers.num_pieces)
    listed = rig.buffers.work[:number].tolist()
    assert number == sum(expected)
    assert bool((rig.buffers.work[number:] == -5).all())
    at, smaller = 0, max(lengths)
    while at < number:
        row, count = listed[at][0], listed[at][5]
        index = order[row]
        state = [rig.slots[index], lengths[index], rig.cells[index][-1], at, count]
        assert count == expected[index]
        assert [item[:6] for item in listed[at : at + count]] == [[row, *state]] * count
        assert [item[6] for item in listed[at : at + count]] == list(range(count))
        assert -(-lengths[index] // count) <= smaller
        at, smaller = at + count, -(-lengths[index] // count)


def test_row_without_finite_logits_is_marked_and_hurts_no_other() -> None:
    plan = library(ONE_SPLIT)
    rig = Rig(LLAMA, lengths=[4, 9], width=2, plan=plan, device=DEVICE)
    rig.pool[0][1][rig.cells[0][2]] = float("nan")
    order = rig.place_rows()
    expected = rig.reference_logits()
    rig.chain.run(2, plan)
    bad = rig.state.bad_rows.tolist()
    assert bad[order.index(0)] == 1
    assert bad[order.index(1)] == 0
    drawn = rig.follow(order)
    assert drawn[1] == int(expected[1].argmax())
    assert 0 <= drawn[0] < LLAMA.vocab_size


def test_equal_logits_give_the_lowest_token() -> None:
    for plan in (library(ONE_SPLIT), gemv(ONE_SPLIT), split_k(ONE_SPLIT, swap=True)):
        rig = Rig(LLAMA, lengths=[4], width=1, plan=plan, device=DEVICE)
        rig.weights.head.zero_()
        rig.place_rows()
        rig.chain.run(1, plan)
        assert rig.state.out_tokens.tolist() == [0]
        assert rig.state.bad_rows.tolist() == [0]


def test_reference_can_tell_a_wrong_window() -> None:
    plan = library(ONE_SPLIT)
    wrong = DecodeShape(**{n: getattr(MISTRAL, n) for n in DecodeShape.__slots__} | {"windows": (8, None)})
    rig = Rig(MISTRAL, lengths=[30], width=1, plan=plan, device=DEVICE)
    rig.chain._shape = wrong
    rig.place_rows()
    expected = rig.reference_logits()
    rig.chain.run(1, plan, lambda logits, slots, state: None)
    assert relative_error(rig.buffers.logits[0], expected[0]) > 1e-3
