"""Quantized layers: what they cost in perplexity, what they demand of a program, and what is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from cluster.language.text import load_text
from planner.errors import InvalidConfiguration
from planner.slices import Method, Slice
from tests.quiet_text import TEXT
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, chunk, executor_of, load, request
from worker.batch import cut
from worker.config import EngineConfig, Quantization
from worker.cuda.fp8 import check_fp8_matrix, fp8_weights
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool
from worker.models.decoder import Decoder
from worker.program import load_program
from worker.quantize import quantize_weights


def perplexity(decoder: Decoder, tokens: list[int]) -> float:
    config = decoder.config
    pool = KvPool(
        config.num_layers, len(tokens), config.num_kv_heads, config.head_dim, torch.bfloat16, torch.device("cpu")
    )
    whole = Slice(0, len(tokens), Method.PREFILL)
    batch = cut([chunk(tokens, range(len(tokens)))], whole, wanted=lambda index: True)
    assert batch is not None
    rows = list(range(len(tokens) - 1))
    with torch.inference_mode():
        logits = EagerForwards(decoder, pool).run(batch, Method.PREFILL, rows).rows(rows)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    return math.exp(loss)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_perplexity_grows_by_at_most_two_percent_in_int8_and_eight_in_int4_and_fp8(smollm2_path: Path) -> None:
    settings = EngineConfig(model=os.fspath(smollm2_path), device="cpu", dtype="bfloat16", max_model_len=512)
    decoder = load_program(settings).decoder
    tokens = load_text(smollm2_path).encode(TEXT)
    assert len(tokens) > 250
    torch.set_num_threads(2)
    exact = perplexity(decoder, tokens)
    assert 2 < exact < 60
    kinds: tuple[tuple[Quantization, float], ...] = (("int8", 1.02), ("int4", 1.08))
    for quantization, most in kinds:
        quantized = Decoder(decoder.config, quantize_weights(decoder.weights, quantization), decoder.context)
        found = perplexity(quantized, tokens)
        assert exact / most < found < exact * most, quantization
        assert found != exact
    fp8 = perplexity(Decoder(decoder.config, fp8_weights(decoder.weights), decoder.context), tokens)
    assert exact < fp8 < exact * 1.08


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_answer_alike_under_every_schedule(tmp_path: Path, quantization: Quantization) -> None:
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 96})
    program = load(str(tmp_path), quantization=quantization)
    assert program.info.min_prefill_tokens == 5
    assert program.info.weight_bytes < load(str(tmp_path)).info.weight_bytes / 2
    requests = [request([5, 17, 3], 5), request(list(range(40)), 5), request([9], 5)]
    alone = Rig(executor_of(program, 256, 5)).answer_alone(requests)
    assert Rig(executor_of(program, 256, 5)).answer(requests) == alone
    assert Rig(executor_of(program, 256, 5), prefill_chunk_tokens=4).answer(requests) == alone


def test_what_no_kernel_takes_is_refused_with_the_numbers(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    for settings, said in (
        ({"quantization": "int4"}, "multiple of 32 columns and 16 rows; qkv has 48 and 128"),
        ({"quantization": "fp8"}, "compute capability 8.9"),
        ({"quantization": "int8", "min_prefill_tokens": 4}, "at least 5 with int8 weights.*not 4"),
    ):
        with pytest.raises(InvalidConfiguration, match=said):
            load(str(tmp_path), **settings)


def test_a_shape_that_fp8_does_not_multiply_is_refused_rather_than_left_as_it_is(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, sizes={"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10})
    config = EngineConfig(model=str(tmp_path), device="cpu")
    with pytest.raises(InvalidConfiguration, match="multiple of 16 columns and rows; qkv has 48 and 50"):
        load_program(config, see_weights=lambda weights: check_fp8_matrix("qkv", weights.layers[0].qkv))
