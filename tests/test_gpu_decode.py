"""Captured decode steps at the sizes of real models (two layers of them), with the plans that production uses, against
the float32 reference: ragged lengths, shuffled cells, padding rows, rows permuted between steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from tests.decode_rig import Rig, relative_error  # noqa: E402
from worker.cuda.decode_plan import AttentionTile, Chain, DecodePlan, plan_decode  # noqa: E402
from worker.cuda.decode_shape import DecodeShape  # noqa: E402
from worker.cuda.graphs import DecodeGraphs, Draw  # noqa: E402

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256, context=1024,
    norm_eps=1e-5, dtype=BF16, windows=(None,) * 2,
)  # fmt: skip
QWEN3_06B = DecodeShape(
    hidden=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936, context=1024,
    norm_eps=1e-6, dtype=BF16, windows=(None,) * 2, qk_norm=True,
)  # fmt: skip
QWEN2_05B = DecodeShape(
    hidden=896, num_heads=14, num_kv_heads=2, head_dim=64, ffn=4864, vocab_size=32000, context=512,
    norm_eps=1e-6, dtype=BF16, windows=(None,) * 2, qkv_bias=True,
)  # fmt: skip
MISTRAL_SMALL = DecodeShape(
    hidden=1280, num_heads=16, num_kv_heads=4, head_dim=80, ffn=2560, vocab_size=32000, context=512,
    norm_eps=1e-5, dtype=BF16, windows=(100, None),
)  # fmt: skip
ODD_HALF = DecodeShape(
    hidden=200, num_heads=6, num_kv_heads=1, head_dim=96, ffn=300, vocab_size=1003, context=256,
    norm_eps=1e-5, dtype=torch.float16, windows=(None,) * 2,
)  # fmt: skip
TINY_FLOAT = DecodeShape(
    hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=128, vocab_size=203, context=256,
    norm_eps=1e-5, dtype=torch.float32, windows=(None,) * 2,
)  # fmt: skip
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CASES = [
    *((name, shape, width) for name, shape in (("llama", LLAMA_8B), ("qwen3", QWEN3_06B)) for width in WIDTHS),
    *(("qwen2 bias", QWEN2_05B, width) for width in (1, 8, 64)),
    *(("mistral window", MISTRAL_SMALL, width) for width in (1, 4, 32, 128)),
    *(("odd half", ODD_HALF, width) for width in (1, 8, 32)),
    *(("tiny float", TINY_FLOAT, width) for width in (1, 4, 128)),
]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def ragged_rig(shape: DecodeShape, width: int, plan: DecodePlan, seed: int = 0) -> Rig:
    """A rig of that width with one padding row (if there is room), lengths from none to nearly the whole context."""
    draw = random.Random(seed + width)
    longest = min(shape.context, 900) - 8
    lengths = [
        min(longest, draw.choice((0, 1, 15, 16, 17, 128, 255, 256, draw.randrange(longest))))
        for _ in range(max(1, width - 1))
    ]
    lengths[0] = longest
    return Rig(shape, lengths, width, plan, CUDA, seed)


def hopper() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


LISTED = AttentionTile(splits=1, block=32, warps=1, stages=5, share=16, pieces=64)
EARLY = [
    *((shape, width, None) for shape in (LLAMA_8B, QWEN3_06B) for width in (1, 8, 16, 32, 64)),
    *((replace(LLAMA_8B, quantization=each), width, None) for each in ("int8", "int4") for width in (1, 8)),
    (QWEN3_06B, 256, None),
    *((LLAMA_8B, width, None) for width in (96, 128, 256)),  # whose products are the library's
    *((shape, 8, None) for shape in (ODD_HALF, TINY_FLOAT)),
    (QWEN3_06B, 16, LISTED),  # whose q/k/v start attention before the list is whole
]


@pytest.mark.parametrize(("shape", "width", "attention"), EARLY)
def test_kernels_that_start_early_change_no_bit(
    shape: DecodeShape, width: int, attention: AttentionTile | None
) -> None:
    """One that read what a kernel before it had not written yet would."""
    plan = plan_decode(shape, width, hopper=True)
    plan = plan if attention is None else replace(plan, attention=attention)
    assert plan.dependent_launch
    assert not (attention and not plan.early_qkv)
    early, waiting = (steps_of(shape, width, each) for each in (plan, replace(plan, dependent_launch=False)))
    assert early[0] == waiting[0]
    assert torch.equal(early[1], waiting[1])


def steps_of(shape: DecodeShape, width: int, plan: DecodePlan) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of three captured steps, and what they left in the cells."""
    rig = ragged_rig(shape, width, plan)
    graphs = DecodeGraphs(lambda w, draw: rig.chain.run(w, plan), [width], [Draw.GREEDY])
    tokens = []
    for _ in range(3):
        order = rig.place_rows()
        graphs.replay(width, Draw.GREEDY)
        tokens.append(rig.follow(order))
    return tokens, torch.stack([plane[[own[-1] for own in rig.cells]] for pair in rig.pool for plane in pair])


@pytest.mark.parametrize(("name", "shape", "width"), CASES, ids=[f"{name}-{width}" for name, _, width in CASES])
def test_captured_steps_give_what_float32_gives(name: str, shape: DecodeShape, width: int) -> None:
    plan = plan_decode(shape, width, hopper=hopper())
    rig = ragged_rig(shape, width, plan)
    graphs = DecodeGraphs(lambda w, draw: rig.chain.run(w, plan), [width], [Draw.GREEDY])
    for _ in range(3):
        order = rig.place_rows()
        expected = rig.reference_logits()
        graphs.replay(width, Draw.GREEDY)
        for index, token in enumerate(rig.follow(order)):
            shortfall = expected[index].max() - expected[index][token]
            assert float(shortfall) <= 10 * TOLERANCE[shape.dtype] * float(expected[index].std())
        for index, history in enumerate(rig.histories):
            for (k, v), keys, values in zip(rig.pool, history.keys, history.values, strict=True):
                assert relative_error(k[rig.cells[index][-1]], keys[-1]) < TOLERANCE[shape.dtype]
                assert relative_error(v[rig.cells[index][-1]], values[-1]) < TOLERANCE[shape.dtype]
    assert rig.state.bad_rows.sum() == 0
    assert int(rig.state.length[rig.state.scratch_slot]) == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=["llama", "qwen3"])
def test_both_draws_captured_or_eager_agree(shape: DecodeShape, width: int) -> None:
    eager, greedy, sampled = (_drawn_tokens(shape, width, draw) for draw in (None, Draw.GREEDY, Draw.SAMPLED))
    assert eager == greedy == sampled
    assert all(token % 2 == 0 for step in eager for token in step)


def _drawn_tokens(shape: DecodeShape, width: int, draw: Draw | None) -> list[list[int]]:
    """Two steps' tokens from one seed, run eagerly (None) or captured. Every logit occurs twice, so that the lower
    token of each pair must win."""
    plan = plan_decode(shape, width, hopper=hopper())
    rig = ragged_rig(shape, width, plan)
    rig.weights.head[1::2] = rig.weights.head[::2]

    def arg_max(logits: torch.Tensor, row_slots: torch.Tensor, state: object) -> None:
        rig.state.out_tokens[: len(logits)] = logits.argmax(-1)

    def step(width: int, kind: Draw | None) -> None:
        rig.chain.run(width, plan, arg_max if kind is Draw.SAMPLED else None)

    graphs = None if draw is None else DecodeGraphs(step, [width], [draw])
    tokens = []
    for _ in range(2):
        order = rig.place_rows()
        if graphs is None or draw is None:
            step(width, None)
        else:
            graphs.replay(width, draw)
        tokens.append(rig.follow(order))
    return tokens


@pytest.mark.parametrize("width", [1, 8, 64, 256])
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=["llama", "qwen3"])
def test_logits_of_a_sampled_step_are_float32s(shape: DecodeShape, width: int) -> None:
    plan = plan_decode(shape, width, hopper=hopper())
    rig = ragged_rig(shape, width, plan)
    order = rig.place_rows()
    expected = rig.reference_logits()
    rig.buffers.logits.fill_(float("nan"))
    rig.chain.run(width, plan, lambda logits, row_slots, state: None)
    for row, index in enumerate(order):
        assert relative_error(rig.buffers.logits[row], expected[index]) < 1e-2


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=["llama", "qwen3"])
def test_every_chain_gives_the_same_logits(shape: DecodeShape) -> None:
    logits = {}
    plans = [plan_decode(shape, width, hopper=hopper()) for width in (1, 8)]
    for plan in [*plans, plan_decode(shape, 1, hopper=False)]:
        rig = ragged_rig(shape, 1, plan)
        rig.place_rows()
        rig.chain.run(1, plan, lambda logits, row_slots, state: None)
        logits[plan.chain] = rig.buffers.logits[0].clone()
    for chain in logits:
        assert relative_error(logits[chain], logits[Chain.LIBRARY]) < 1e-2
