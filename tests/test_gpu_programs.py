"""Programs and quantized layers on a GPU: the operator against the oracle, a program against its own eager model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from planner.slices import Method, Slice
from tests.tiny_models import save_tiny_model
from tests.torch_rig import chunk
from worker.attention import Span, TorchAttention
from worker.attention_op import attention_of
from worker.batch import cut
from worker.config import EngineConfig, Quantization
from worker.forwards import EagerForwards, Forwards
from worker.kv_pool import KvPool
from worker.program import Program, load_program
from worker.programs.export import export_model
from worker.programs.forwards import ProgramForwards
from worker.programs.loading import load_forwards
from worker.programs.metadata import read_metadata

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
NUM_CELLS = 256
# A row's greedy token may differ where its two best logits are nearer than this (bfloat16, other shapes of products).
GAP = 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_attends_as_the_oracle_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pools = [KvPool(2, NUM_CELLS, 2, 64, dtype, DEVICE) for _ in range(2)]
    history = torch.randn(2, 2, NUM_CELLS + 1, 2, 64, dtype=dtype, device=DEVICE)
    for pool in pools:
        pool.keys.copy_(history[0])
        pool.values.copy_(history[1])
    order = np.random.default_rng(0).permutation(NUM_CELLS).astype(np.int32)
    spans = [Span(0, 30, 1, order[:31]), Span(1, 0, 40, order[31:71]), Span(41, 90, 5, order[71:166])]
    query = torch.randn(46, 4, 64, dtype=dtype, device=DEVICE)
    key, value = torch.randn(2, 46, 2, 64, dtype=dtype, device=DEVICE).unbind(0)
    windows = (None, 9)
    ours, oracle = attention_of(pools[0], spans, windows, 4), TorchAttention(pools[1], spans, windows)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    for layer in range(2):
        torch.testing.assert_close(
            ours.attend(layer, query, key, value),
            oracle.attend(layer, query, key, value),
            atol=tolerance,
            rtol=tolerance,
        )
        assert torch.equal(pools[0].keys[layer], pools[1].keys[layer])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_a_program_gives_the_logits_of_its_eager_model(tmp_path: Path, quantization: Quantization) -> None:
    if shutil.which("g++") is None:
        pytest.skip("exporting compiles C++, and there is no g++")
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 128, "intermediate_size": 256})
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="bfloat16", quantization=quantization, max_prefill_tokens=32
    )
    program = load_program(config)
    export_model(config, tmp_path / "tiny.pt2", (1, 4), {}, lambda line: None)
    metadata = read_metadata(tmp_path / "tiny.pt2")
    forwards = load_forwards(tmp_path / "tiny.pt2", metadata, pool_of(program))
    assert isinstance(forwards, ProgramForwards)
    assert metadata.min_prefill_tokens == (5 if quantization in ("int8", "int4") else 2)
    eager = EagerForwards(program.decoder, pool_of(program))
    for lengths, method in (((20, 1, 7), Method.PREFILL), ((3,), Method.PREFILL), ((1, 1, 1), Method.DECODE)):
        ours, theirs = logits(forwards, lengths, method), logits(eager, lengths, method)
        torch.testing.assert_close(ours, theirs, atol=GAP, rtol=GAP)
        top = theirs.topk(2, dim=-1).values
        clear = top[:, 0] - top[:, 1] > GAP
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


def pool_of(program: Program) -> KvPool:
    info = program.info
    return KvPool(info.num_layers, NUM_CELLS, info.num_kv_heads, info.head_dim, torch.bfloat16, DEVICE)


def logits(forwards: Forwards, lengths: tuple[int, ...], method: Method) -> Tensor:
    """Of every row of fresh sequences of these lengths."""
    random, chunks, first = np.random.default_rng(1), [], 0
    for number, length in enumerate(lengths):
        tokens = random.integers(0, 97, size=length).tolist()
        chunks.append(chunk(tokens, range(first, first + length), sequence_id=number))
        first += length
    batch = cut(chunks, Slice(0, first, method), wanted=lambda index: True)
    assert batch is not None
    with torch.inference_mode():
        rows = list(range(first))
        return forwards.run(batch, method, rows).rows(rows).float()
