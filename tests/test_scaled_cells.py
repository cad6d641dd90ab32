"""Kernels over cells of eight bits, against float64 of what the cells hold. Runs on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Request, SamplingParams  # noqa: E402
from tests.cuda_rig import Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from tests.decode_rig import Rig as ChainRig  # noqa: E402
from tests.decode_rig import relative_error  # noqa: E402
from tests.test_decode_chain import CASES  # noqa: E402
from tests.test_gpu_prefill import MOST_ERROR, RAGGED, Sequence, Shape, error, reference  # noqa: E402
from worker.attention import Span  # noqa: E402
from worker.cell_rows import SCALED, packed_rows, unpacked_rows  # noqa: E402
from worker.cuda.decode_plan import Chain  # noqa: E402
from worker.cuda.prefill_attention import attend  # noqa: E402
from worker.cuda.prefill_plan import plan_prefill  # noqa: E402
from worker.cuda.write_cells import rotate_and_write  # noqa: E402
from worker.kv_pool import KvPool  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Of what attention gives, by what eight bits lose of normally distributed keys and values.
MOST_LOST = 0.06
# A number that lies halfway between two of eight bits may be rounded either way.
MOST_FLIPS = 1e-3


def scene(sequences: list[Sequence], shape: Shape) -> tuple[KvPool, list[Span], list[torch.Tensor], list[torch.Tensor]]:
    """Sequences whose cells are all written, in a pool where everything else is NaN; and their keys and values."""
    lengths = [start + length for start, length in sequences]
    order = (1 + np.random.default_rng(0).permutation(sum(lengths) + 16)).astype(np.int32)
    pool = KvPool(1, len(order) + 1, shape.num_kv_heads, shape.head_dim, SCALED, DEVICE)
    pool.keys.fill_(255)
    pool.values.fill_(255)
    spans, kept, row, taken = [], ([], []), 0, 0
    for (start, length), total in zip(sequences, lengths, strict=True):
        cells = order[taken : taken + total]
        for plane, heads in ((pool.keys, kept[0]), (pool.values, kept[1])):
            heads.append(torch.randn(total, shape.num_kv_heads, shape.head_dim, device=DEVICE))
            plane[0, torch.from_numpy(cells.astype(np.int64)).to(DEVICE), 0] = packed_rows(heads[-1])
        spans.append(Span(row, start, length, cells))
        row, taken = row + length, taken + total
    return pool, spans, *kept


def flips(held: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of numbers that differ by more than their last bits."""
    return float(((held - expected).abs() > 1e-3 * expected.abs()).float().mean())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(7, 1, 80), Shape(16, 1, 64)], ids=str)
def test_chunks_attend_to_what_their_cells_hold(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    sequences = RAGGED if shape.num_heads < 16 else [Sequence(3, 33), Sequence(0, 31), Sequence(70, 41), Sequence(0, 1)]
    pool, spans, keys, values = scene(sequences, shape)
    query = torch.randn(sum(s.length for s in spans), shape.num_heads, shape.head_dim, device=DEVICE).to(dtype)
    out = torch.full_like(query, torch.nan)
    attend(query, *pool.layer(0), plan_prefill(spans, shape.num_heads // shape.num_kv_heads, DEVICE), out, window)
    for span, key, value in zip(spans, keys, values, strict=True):
        rows = slice(span.row, span.row + span.length)
        held = [unpacked_rows(packed_rows(heads), *heads.shape[1:]) for heads in (key, value)]
        assert error(out[rows], reference(query[rows], *held, span.start, window)) < MOST_ERROR[dtype]
        assert error(out[rows], reference(query[rows], key, value, span.start, window)) < MOST_LOST


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(7, 1, 80), Shape(32, 8, 128)], ids=str)
def test_prefill_writes_rows_as_plain_torch_packs_them(shape: Shape, has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim = shape
    sequences = RAGGED[:3]
    pool, spans, _, _ = scene(sequences, shape)
    plan = plan_prefill(spans, num_heads // num_kv_heads, DEVICE)
    cells = plan.new_cells.long()
    pool.keys[0, cells], pool.values[0, cells] = 255, 255
    before = pool.keys.clone(), pool.values.clone()
    num_tokens = sum(s.length for s in spans)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE)
    qkv[1, num_heads] = 0.0
    angles = torch.rand(256, head_dim // 2, device=DEVICE) * 6
    norms = [torch.rand(head_dim, device=DEVICE) + 0.5 for _ in range(2)] if has_norm else [None, None]
    query = torch.empty(num_tokens, num_heads, head_dim, device=DEVICE)
    tables = (plan.positions, plan.new_cells, angles.cos(), angles.sin())
    rotate_and_write(qkv.view(num_tokens, -1), *tables, *pool.layer(0), query, *norms, eps=1e-5)
    exact = KvPool(1, pool.num_cells, num_kv_heads, head_dim, torch.float32, DEVICE)
    rotate_and_write(qkv.view(num_tokens, -1), *tables, *exact.layer(0), torch.empty_like(query), *norms, eps=1e-5)
    value = unpacked_rows(packed_rows(qkv[:, num_heads + num_kv_heads :]), num_kv_heads, head_dim)
    assert flips(unpacked_rows(pool.values[0, cells, 0], num_kv_heads, head_dim), value) < MOST_FLIPS
    held = unpacked_rows(pool.keys[0, cells, 0], num_kv_heads, head_dim)
    assert flips(held, unpacked_rows(packed_rows(exact.keys[0, cells]), num_kv_heads, head_dim)) < MOST_FLIPS
    assert error(held, exact.keys[0, cells]) < MOST_LOST
    others = torch.ones(pool.num_cells + 1, dtype=torch.bool, device=DEVICE)
    others[cells] = False
    assert torch.equal(pool.keys[0, others], before[0][0, others])
    assert torch.equal(pool.values[0, others], before[1][0, others])


@pytest.mark.parametrize("name", CASES)
def test_decode_steps_read_and_write_scaled_rows(name: str) -> None:
    shape, plan = CASES[name]
    lengths = [37] if plan.chain is Chain.GEMV else [0, 1, 16, 37]
    rig = ChainRig(shape, lengths, width=len(lengths), plan=plan, device=DEVICE, cell_dtype=SCALED)
    for step in range(2):
        order = rig.place_rows()
        expected = rig.reference_logits()
        rig.chain.run(rig.width, plan)
        assert rig.follow(order) == [int(logits.argmax()) for logits in expected], step
        for index, history in enumerate(rig.histories):
            for (k, v), keys, values in zip(rig.newest(index), history.keys, history.values, strict=True):
                assert relative_error(k, keys[-1]) < 2e-2  # one number of few, rounded the other way
                assert relative_error(v, values[-1]) < 2e-2


@pytest.mark.parametrize("cell_dtype", [SCALED, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_answers_are_those_of_a_cpu_whose_cells_are_rounded_alike(name: str, cell_dtype: torch.dtype) -> None:
    model = tiny_model(name)
    num_tokens = 4 if INTERPRETED else 24
    draw = np.random.default_rng(0)
    requests = [
        Request(draw.integers(0, 200, size=length), num_tokens, SamplingParams(temperature=0.0), n=n)
        for length, n in ((5, 1), (40, 2), (1, 1), (17, 1))
    ]
    expected = Rig(torch_executor(model, cell_dtype=cell_dtype)).answer(requests)
    if cell_dtype == SCALED and not INTERPRETED:  # so few tokens may be the same
        assert expected != Rig(torch_executor(model)).answer(requests)
    executor = cuda_executor(model, cell_dtype=cell_dtype, captured_widths=(8, 32))
    assert Rig(executor, depth=2).answer(requests) == expected
