"""Decode steps with adapters at the sizes of real models (two layers of them), with the plans that production uses,
against the float32 reference with each row's adapter merged into its weights. In Triton's interpreter on tiny ones."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Adapter  # noqa: E402
from tests.cuda_rig import DEVICE, LLAMA  # noqa: E402
from tests.decode_reference import reference_step  # noqa: E402
from tests.decode_rig import Rig, relative_error  # noqa: E402
from tests.lora_rig import merged_weights, random_matrices  # noqa: E402
from tests.test_decode_chain import LLAMA as TINY  # noqa: E402
from tests.test_decode_chain import PACKED, PACKED4, QWEN3, SPLITS, gemv, packed_split, split_k  # noqa: E402
from worker.cuda.decode_plan import Chain, DecodePlan, adapted, plan_decode  # noqa: E402
from worker.cuda.decode_shape import DecodeShape  # noqa: E402
from worker.cuda.graphs import DecodeGraphs, Draw  # noqa: E402
from worker.cuda.lora import CudaLoraSlots  # noqa: E402
from worker.models.config import ModelConfig  # noqa: E402

LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=32000, context=256,
    norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,) * 2,
)  # fmt: skip
QWEN3_06B = replace(LLAMA_8B, hidden=1024, num_heads=16, ffn=3072, qk_norm=True)
RANKS = ((16,), (4, 0, 9))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def config_of(shape: DecodeShape) -> ModelConfig:
    return replace(
        LLAMA, vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, windows=shape.windows, qk_norm=shape.qk_norm, qkv_bias=shape.qkv_bias,
    )  # fmt: skip


def check_production(shape: DecodeShape, width: int, plan: DecodePlan, chain: Chain) -> None:
    plan = adapted(plan, shape)
    assert plan.chain is chain
    check(shape, width, plan)


def check(shape: DecodeShape, width: int, plan: DecodePlan) -> None:
    """Two steps: sequences take turns with the adapters and none; one row is padding where there is room."""
    lengths = [(7 * index) % 40 for index in range(max(1, width - 1))]
    rig, config = Rig(shape, lengths, width, plan, DEVICE), config_of(shape)
    slots = CudaLoraSlots(config, len(RANKS) + 1, 16, shape.dtype, DEVICE)
    weights, adapters = [rig.exact], list[Adapter | None]([None])
    for number, ranks in enumerate(RANKS):
        matrices = random_matrices(config, number, ranks, layers=shape.num_layers, strength=0.2)
        adapters.append(Adapter(str(number), number))
        slots.put(len(RANKS) - number, Adapter(str(number), number), slots.packed(matrices))
        weights.append(merged_weights(config, rig.exact, matrices, shape.dtype))
    beside = slots.beside(rig.state.row_adapters[:width], dependent_launch=plan.dependent_launch)

    def most_likely(logits: torch.Tensor, row_slots: torch.Tensor, state: object) -> None:
        rig.state.out_tokens[: len(logits)] = logits.argmax(-1)

    def run(width: int, draw: Draw) -> None:
        rig.chain.run(width, plan, most_likely, beside)

    graphs = None if INTERPRETED else DecodeGraphs(run, [width], [Draw.ADAPTED_SAMPLED])
    for step in range(2):
        order = rig.place_rows()
        chosen = [(index + step + 1) % len(weights) for index in range(len(lengths))]
        rows = slots.slots_of([adapters[chosen[index]] for index in order])
        rig.state.set_rows([rig.slots[index] for index in order], [rig.cells[index][-1] for index in order], rows)
        if graphs is None:
            run(width, Draw.ADAPTED_SAMPLED)
        else:
            graphs.replay(width, Draw.ADAPTED_SAMPLED)
        for row, index in enumerate(order):
            token, history = rig.tokens[index], rig.histories[index]
            expected = reference_step(shape, weights[chosen[index]], rig.rotary, token, history)
            error, most = relative_error(rig.buffers.logits[row], expected), TOLERANCE[shape.dtype]
            assert error < most, f"step {step}, row {row} with adapter {chosen[index]}"
            for (k, v), keys, values in zip(rig.pool, history.keys, history.values, strict=True):
                assert relative_error(k[rig.cells[index][-1]], keys[-1]) < TOLERANCE[shape.dtype]
                assert relative_error(v[rig.cells[index][-1]], values[-1]) < TOLERANCE[shape.dtype]
        rig.follow(order)


@pytest.mark.parametrize("shape", [TINY, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("swap", [True, False])
def test_rows_of_a_tiny_model(shape: DecodeShape, swap: bool) -> None:
    check(shape, 4, replace(split_k(SPLITS, swap=swap), whole_gate_up=True))


@pytest.mark.parametrize("shape", [PACKED, PACKED4], ids=["eight bits", "four bits"])
def test_rows_of_packed_matrices(shape: DecodeShape) -> None:
    check(shape, 4, replace(packed_split(SPLITS), whole_gate_up=True))


def test_one_row_runs_as_several_do() -> None:
    check_production(TINY, 1, gemv(SPLITS), Chain.SPLIT_K)


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("width", [1, 2, 8, 32, 48, 64, 128])
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=["llama", "qwen3"])
def test_captured_steps_of_real_sizes(shape: DecodeShape, width: int) -> None:
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    is_split = hopper and (width <= 64 or shape is QWEN3_06B)
    chain = Chain.SPLIT_K if is_split else Chain.LIBRARY
    check_production(shape, width, plan_decode(shape, width, hopper=hopper), chain)


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("width", [1, 8, 48, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_captured_steps_of_packed_matrices(bits: int, width: int) -> None:
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    shape = replace(QWEN3_06B, quantization=f"int{bits}")
    chain = Chain.SPLIT_K if hopper else Chain.LIBRARY
    check_production(shape, width, plan_decode(shape, width, hopper=hopper), chain)


def test_what_an_adapter_changes_is_more_than_the_tolerance() -> None:
    """Else the other tests could not fail."""
    shape = TINY if INTERPRETED else QWEN3_06B
    rig, config = Rig(shape, [9], 1, adapted(gemv(SPLITS), TINY), DEVICE), config_of(shape)
    plain = rig.reference_logits()[0]
    for number, ranks in enumerate(RANKS):
        again = Rig(shape, [9], 1, adapted(gemv(SPLITS), TINY), DEVICE)
        again.exact = merged_weights(
            config, rig.exact, random_matrices(config, number, ranks, layers=shape.num_layers, strength=0.2)
        )
        assert relative_error(again.reference_logits()[0], plain) > 0.1
