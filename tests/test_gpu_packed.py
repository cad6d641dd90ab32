"""Executors over matrices of eight and four bits: what they answer is what the matrices stand for.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from benchmarks.random_model import write_model  # noqa: E402
from planner.request import Request, SamplingParams  # noqa: E402
from tests.cuda_rig import CONTEXT, DEVICE, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from worker.config import EngineConfig, Quantization  # noqa: E402
from worker.cuda.decode_plan import Chain, plan_decode  # noqa: E402
from worker.cuda.decode_shape import decode_shape  # noqa: E402
from worker.cuda.executor import CudaExecutor  # noqa: E402
from worker.cuda.packed import PACKED, pack_weights, values_of  # noqa: E402
from worker.cuda.packed_products import unpacked  # noqa: E402
from worker.models.decoder import Decoder  # noqa: E402
from worker.models.rope_tables import rope_tables  # noqa: E402
from worker.models.weights import DecoderWeights  # noqa: E402
from worker.program import build_executor, load_program  # noqa: E402

NUM_TOKENS = 3 if INTERPRETED else 24
GREEDY = SamplingParams(temperature=0.0)
# A drawn token's log probability may be less than the best one's by this (bfloat16, products in another order).
GAP = 0.1


def requests(vocab_size: int, lengths: tuple[int, ...] = (1, 5, 17, 40)) -> list[Request]:
    draw = np.random.default_rng(3)
    return [Request(draw.integers(0, vocab_size, size=length), NUM_TOKENS, GREEDY) for length in lengths]


def plain(weights: DecoderWeights) -> DecoderWeights:
    """Tensors of what packed matrices stand for."""
    names = ("qkv", "output", "gate_up", "down")
    layers = tuple(replace(each, **{name: values_of(getattr(each, name)) for name in names}) for each in weights.layers)
    return replace(weights, layers=layers, head=values_of(weights.head))


def with_weights(model: Model, weights: DecoderWeights) -> Model:
    return replace(model, decoder=Decoder(model.decoder.config, weights, CONTEXT))


@pytest.mark.parametrize("quantization", PACKED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "biased"])
def test_answers_in_float32_are_those_of_the_values(name: str, quantization: Quantization) -> None:
    model = tiny_model(name)
    packed = pack_weights(model.decoder.weights, quantization)
    asked = requests(model.decoder.config.vocab_size)
    expected = Rig(torch_executor(with_weights(model, plain(packed)))).answer(asked)
    if quantization == "int4" and not INTERPRETED:  # else this test could not fail
        assert expected != Rig(torch_executor(model)).answer(asked)
    assert Rig(cuda_executor(with_weights(model, packed)), depth=2).answer(asked) == expected


@pytest.mark.parametrize("quantization", PACKED)
def test_the_kernel_that_unpacks_gives_the_values(quantization: Quantization) -> None:
    packed = pack_weights(tiny_model().decoder.weights, quantization).layers[0].down
    assert packed.shape == (64, 96)
    values = packed.values()  # type: ignore[operator]
    torch.testing.assert_close(unpacked(packed), values)  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="captures graphs")
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("quantization", PACKED)
def test_an_engine_draws_what_its_values_score_best(
    tmp_path: Path, quantization: Quantization, cuda_graph: bool
) -> None:
    """At sizes that the kernels for few rows take, one row to eight of them beside chunks of prompts."""
    folder = write_model("small", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", load_format="dummy", quantization=quantization,
        max_model_len=CONTEXT, max_num_seqs=8, max_prefill_tokens=64, max_cells=2048, swap_space=0,
        cuda_graph=cuda_graph,
    )  # fmt: skip
    decoder = load_program(config).decoder
    shape = decode_shape(decoder.config, CONTEXT, decoder.dtype, decoder.weights.quantization)
    chains = [plan_decode(shape, width, hopper=True).chain for width in (1, 4)]
    assert chains == [Chain.GEMV, Chain.SPLIT_K]
    executor = build_executor(config)
    assert isinstance(executor, CudaExecutor)
    asked = requests(decoder.config.vocab_size, (1, 5, 17, 40, 9))
    answers = Rig(executor, depth=2, max_num_seqs=8).answer(asked) + Rig(executor).answer(asked[2:3])
    executor.close()
    cos, sin = rope_tables(decoder.config.rope, decoder.config.head_dim, CONTEXT)
    oracle = Decoder(decoder.config, plain(decoder.weights), CONTEXT)
    values = Model(oracle, (cos.to(DEVICE), sin.to(DEVICE)), torch.bfloat16)
    far = 0
    for request, answer in zip([*asked, asked[2]], answers, strict=True):
        whole = Request(np.append(request.prompt, answer), 0, replace(GREEDY, logprobs=1), prompt_logprobs=True)
        (updates,) = Rig(torch_executor(values)).updates([whole])
        scores = [score for update in updates for score in update.prompt_logprobs][-len(answer) :]
        far += sum(score.top[0][1] - score.logprob > GAP for score in scores)
    assert far == 0
