"""Products of fp8: rows, products, decode steps and whole engines, against plain torch of the same arithmetic.

Runs on a GPU, or in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_fp8.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.decode_step import asking_ahead
from benchmarks.random_model import write_model
from planner.request import Request, SamplingParams
from tests.cuda_rig import CONTEXT, DEVICE, INTERPRETED, Model, cuda_executor, tiny_model, torch_executor
from tests.cuda_rig import Rig as EngineRig
from tests.decode_rig import Rig, relative_error
from tests.fp8_oracle import plain_fp8
from tests.test_decode_chain import ONE_SPLIT, PACKED, SPLITS
from worker.cell_rows import SCALED
from worker.config import EngineConfig
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import Chain, DecodePlan, plan_decode
from worker.cuda.decode_shape import DecodeShape, decode_shape
from worker.cuda.executor import CudaExecutor
from worker.cuda.fp8 import E4M3, Fp8Matrix, exact_product, fp8_matrix, fp8_rows, fp8_weights
from worker.cuda.fp8_products import code_rows, product_of_rows
from worker.cuda.fp8_tiles import fitted
from worker.cuda.graphs import DecodeGraphs, Draw
from worker.cuda.step_products import StepProducts
from worker.cuda.tiles import LinearTile, LinearTiles
from worker.models.decoder import Decoder
from worker.models.rope_tables import rope_tables
from worker.program import build_executor, load_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))),
        reason="needs a GPU with products of fp8",
    ),
]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="sizes of real models, or graphs")
# The interpreter multiplies bfloat16 matrices wrongly.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 3 if INTERPRETED else 24
# A drawn token's log probability may be less than the best one's by this: what bfloat16 rounds lies on the other side
# of the middle between two codes once in fifty, and then is another code.
GAP = 0.3
# Of a product, by what the tensor cores' sums have fewer bits than float32: half a percent where K is 4,096.
MOST_LOST = 1.5e-2

LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=1003, context=512,
    norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,) * 2, quantization="fp8",
)  # fmt: skip
TINY = replace(PACKED, quantization="fp8", dtype=DTYPE)


def rows_of(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*sizes, device=DEVICE, generator=generator).to(DTYPE)


def test_a_kernel_makes_the_codes_that_plain_torch_makes() -> None:
    x = rows_of(9, 700)[:, :640]  # rows that lie apart
    x[2] = 0
    x[5] = torch.linspace(-1, 1, 640, device=DEVICE) ** 9  # down to the smallest codes
    codes = torch.zeros(9, 640, dtype=torch.uint8, device=DEVICE).view(E4M3)
    scales = torch.zeros(9, device=DEVICE)
    code_rows(x, codes, scales)
    expected, expected_scales = fp8_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    different = codes.float() != expected.float()
    assert int(different.sum()) == 0, f"rows {different.any(dim=1).nonzero().flatten().tolist()}"


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_rows", [3, 70])
def test_what_is_no_number_shows_in_every_product_of_its_row_and_in_no_other(num_rows: int, fault: float) -> None:
    x, matrix = rows_of(num_rows, 128), fp8_matrix(rows_of(64, 128, seed=1))
    x[1, 77] = fault
    product = product_of_rows(x, matrix)
    assert not product[1].isfinite().any()
    assert product[0].isfinite().all()
    assert product[2:].isfinite().all()


def error(num_rows: int, num_columns: int, depth: int) -> float:
    x, matrix = rows_of(num_rows, depth + 32)[:, :depth], fp8_matrix(rows_of(num_columns, depth, seed=1))
    found, expected = product_of_rows(x, matrix), exact_product(*fp8_rows(x), matrix)
    assert found.dtype == DTYPE
    assert found.shape == expected.shape
    return relative_error(found, expected)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65])
def test_any_number_of_rows_is_multiplied_as_plain_torch_does(num_rows: int) -> None:
    assert error(num_rows, 128, 512) < (1e-6 if INTERPRETED else 5e-3)


def test_shapes_that_no_tile_divides_are_multiplied_alike() -> None:
    assert fitted("down", 3, 96, 512) is None
    assert error(3, 96, 512) < (1e-6 if INTERPRETED else 5e-3)
    assert error(3, 128, 80) < (1e-6 if INTERPRETED else 5e-3)
    assert product_of_rows(rows_of(0, 64), fp8_matrix(rows_of(64, 64))).shape == (0, 64)


def test_the_oracle_tells_rows_that_were_not_rounded() -> None:
    x, matrix = rows_of(16, 512), fp8_matrix(rows_of(128, 512, seed=1))
    unrounded = x.float() @ (matrix.codes.float() * matrix.scales[:, None]).t()
    assert relative_error(unrounded, exact_product(*fp8_rows(x), matrix)) > 0.02


@needs_gpu
def test_torchaos_products_by_rows_are_the_same_but_for_the_scales_last_bits() -> None:
    """Its scales are bfloat16's, so that one code in twenty is another one."""
    quantization = pytest.importorskip("torchao.quantization")
    x, w = rows_of(32, 512), rows_of(256, 512, seed=1)
    linear = torch.nn.Linear(512, 256, bias=False, device=DEVICE, dtype=DTYPE)
    linear.weight = torch.nn.Parameter(w, requires_grad=False)
    by_rows = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    quantization.quantize_(linear, by_rows)
    ours = product_of_rows(x, fp8_matrix(w))
    assert relative_error(linear(x), ours) < 0.025
    assert relative_error(x @ w.t(), ours) > 0.03, "nothing was rounded"


@needs_gpu
@pytest.mark.parametrize("width", [1, 8, 16, 24, 48, 64])
def test_a_steps_products_at_full_size_are_those_of_plain_torch(width: int) -> None:
    """Every linear of a layer with the tiles that steps have, the same codes on both sides."""
    shape = LLAMA_8B
    plan = plan_decode(shape, width, hopper=True)
    buffers = DecodeBuffers(shape, width, [plan], DEVICE)
    products, tiles = StepProducts(shape, buffers), plan.linear
    assert tiles is not None
    wrong = {}
    for name, n, k, tile in (
        ("qkv", shape.qkv_columns, shape.hidden, tiles.qkv),
        ("o", shape.hidden, shape.query_columns, tiles.o),
        ("gate_up", 2 * shape.ffn, shape.hidden, tiles.gate_up),
        ("down", shape.hidden, shape.ffn, tiles.down),
    ):
        x, matrix = rows_of(width, k), fp8_matrix(rows_of(n, k, seed=1) * k**-0.5)
        products.coded(x, width, plan)
        expected = exact_product(*fp8_rows(x), matrix)
        if name == "gate_up":
            products.gate_up(x, matrix, width, plan, tile)
            found = buffers.active[:width]
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            products.split(x, matrix, width, plan, tile)
            parts = buffers.partials[: tile.splits * buffers.padded_rows * n].view(tile.splits, -1, n)
            found = parts[:, :width].sum(dim=0)
        wrong[name] = relative_error(found, expected)
    assert max(wrong.values()) < MOST_LOST, wrong


def split_k(*, swap: bool, whole_gate_up: bool = False) -> DecodePlan:
    two = LinearTile(rows=16, columns=16, depth=32, splits=2, stages=2, warps=4, swap=False)
    one = LinearTile(rows=16, columns=64, depth=64, splits=1, stages=2, warps=4, swap=swap)
    tiles = LinearTiles(two, one, one, replace(one, splits=2), replace(one, columns=32, depth=32))
    return DecodePlan(4, Chain.SPLIT_K, SPLITS, linear=tiles, whole_gate_up=whole_gate_up)


_TILE = LinearTile(rows=16, columns=32, depth=32, splits=1, stages=2, warps=4, swap=True)
EVERY_32 = DecodePlan(4, Chain.SPLIT_K, ONE_SPLIT, linear=LinearTiles(_TILE, replace(_TILE, splits=2), *[_TILE] * 3))
PLANS = {
    "library": DecodePlan(4, Chain.LIBRARY, ONE_SPLIT),
    "split k": split_k(swap=False),
    "split k, weights first": split_k(swap=True),
    "split k, whole gate and up": split_k(swap=True, whole_gate_up=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_steps_give_what_the_reference_gives_that_rounds_its_rows(name: str) -> None:
    rig = Rig(TINY, [0, 1, 16, 37], width=4, plan=PLANS[name], device=DEVICE)
    most_error = 1e-4 if INTERPRETED else 5e-2
    for _ in range(2):
        order = rig.place_rows()
        expected = rig.reference_logits()
        rig.chain.run(rig.width, PLANS[name])
        for index, token in enumerate(rig.follow(order)):
            shortfall = expected[index].max() - expected[index][token]
            assert float(shortfall) <= 10 * most_error * float(expected[index].std())
        for index, history in enumerate(rig.histories):
            for (k, v), keys, values in zip(rig.newest(index), history.keys, history.values, strict=True):
                assert relative_error(k, keys[-1]) < most_error
                assert relative_error(v, values[-1]) < most_error


def captured(width: int, plan: DecodePlan) -> tuple[Rig, DecodeGraphs]:
    """Rows of many lengths, the longest first."""
    lengths = [500, *(37 * row % 491 for row in range(1, width))]
    rig = Rig(LLAMA_8B, lengths, width, plan, DEVICE)
    return rig, DecodeGraphs(lambda w, _: rig.chain.run(w, plan), [width], [Draw.GREEDY])


@needs_gpu
@pytest.mark.parametrize("width", [1, 64, 128])
def test_captured_steps_at_full_size_give_what_the_reference_gives(width: int) -> None:
    rig, graphs = captured(width, plan_decode(LLAMA_8B, width, hopper=True))
    off = []
    for _ in range(2):
        order, expected = rig.place_rows(), rig.reference_logits()
        graphs.replay(width, Draw.GREEDY)
        for index, token in enumerate(rig.follow(order)):
            off.append(float((expected[index].max() - expected[index][token]) / expected[index].std()))
        for index, history in enumerate(rig.histories):
            for (k, v), keys, values in zip(rig.newest(index), history.keys, history.values, strict=True):
                assert relative_error(k, keys[-1]) < 5e-2
                assert relative_error(v, values[-1]) < 5e-2
    assert max(off) < 0.3, off
    assert rig.state.bad_rows.sum() == 0


@needs_gpu
@pytest.mark.parametrize("ahead", [0, 512])
@pytest.mark.parametrize("width", [1, 64])
def test_kernels_that_start_early_change_no_bit(width: int, ahead: int) -> None:
    """One that read what the kernel before it had not written yet would."""
    plan = asking_ahead(plan_decode(LLAMA_8B, width, hopper=True), ahead)
    assert plan.dependent_launch
    told = []
    for each in (plan, replace(plan, dependent_launch=False)):
        rig, graphs = captured(width, each)
        tokens = []
        for _ in range(3):
            order = rig.place_rows()
            graphs.replay(width, Draw.GREEDY)
            tokens.append(rig.follow(order))
        cells = [plane[[own[-1] for own in rig.cells]] for pair in rig.pool for plane in pair]
        told.append((tokens, torch.stack(cells)))
    assert told[0][0] == told[1][0]
    assert torch.equal(told[0][1], told[1][1])


def requests(vocab_size: int, lengths: tuple[int, ...] = (1, 5, 17, 40)) -> list[Request]:
    draw = np.random.default_rng(3)
    return [Request(draw.integers(0, vocab_size, size=length), NUM_TOKENS, GREEDY) for length in lengths]


@pytest.mark.skipif(not INTERPRETED, reason="float32 has no vendor's product of fp8")
@pytest.mark.parametrize(
    ("name", "plan"), [("llama", None), ("llama", EVERY_32), ("biased", None), ("qwen3", EVERY_32)]
)
def test_answers_in_float32_are_those_of_plain_torch(name: str, plan: DecodePlan | None) -> None:
    model = tiny_model(name)
    rounded = with_weights(model, fp8_weights(model.decoder.weights))
    asked = requests(model.decoder.config.vocab_size)
    expected = EngineRig(torch_executor(with_weights(model, plain_fp8(rounded.decoder.weights)))).answer(asked)
    choose: Callable[[DecodeShape, int], DecodePlan] | None = None
    if plan is not None:
        choose = lambda _, width: replace(plan, width=width)  # noqa: E731
    assert EngineRig(cuda_executor(rounded, plan=choose), depth=2).answer(asked) == expected


def with_weights(model: Model, weights: object) -> Model:
    return replace(model, decoder=Decoder(model.decoder.config, weights, CONTEXT))  # type: ignore[arg-type]


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graph": False}, {"kv_cache_dtype": "fp8"}], ids=["", "eager", "cells"])
def test_an_engine_draws_what_plain_torch_scores_best(tmp_path: Path, settings: dict[str, object]) -> None:
    """One row to eight of them beside chunks of prompts, few rows and many; and the engine is the fast one."""
    folder = write_model("small", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", load_format="dummy", quantization="fp8",
        max_model_len=CONTEXT, max_num_seqs=8, max_prefill_tokens=256, max_cells=2048, swap_space=0, **settings,
    )  # fmt: skip
    decoder = load_program(config).decoder
    assert isinstance(decoder.weights.layers[0].down, Fp8Matrix)
    shape = decode_shape(decoder.config, CONTEXT, decoder.dtype, decoder.weights.quantization)
    assert plan_decode(shape, 4, hopper=True).chain is Chain.SPLIT_K
    executor = build_executor(config)
    assert isinstance(executor, CudaExecutor)
    asked = requests(decoder.config.vocab_size, (1, 5, 17, 200, 9))
    wide = {"max_batched_tokens": 256, "prefill_chunk_tokens": 128}
    answers = EngineRig(executor, depth=2, max_num_seqs=8, **wide).answer(asked) + EngineRig(executor, **wide).answer(
        asked[2:3]
    )
    executor.close()
    cos, sin = rope_tables(decoder.config.rope, decoder.config.head_dim, CONTEXT)
    oracle = Decoder(decoder.config, plain_fp8(decoder.weights), CONTEXT)
    model = Model(oracle, (cos.to(DEVICE), sin.to(DEVICE)), torch.bfloat16)
    cells = SCALED if "kv_cache_dtype" in settings else None
    worst = []
    for request, answer in zip([*asked, asked[2]], answers, strict=True):
        whole = Request(np.append(request.prompt, answer), 0, replace(GREEDY, logprobs=1), prompt_logprobs=True)
        (updates,) = EngineRig(torch_executor(model, cell_dtype=cells)).updates([whole])
        scores = [score for update in updates for score in update.prompt_logprobs][-NUM_TOKENS:]
        worst.append(max(score.top[0][1] - score.logprob for score in scores))
    assert max(worst) < GAP, worst
