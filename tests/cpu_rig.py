"""Small random decoders for forwards on the CPU, and what two kinds of forwards make of one batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.slices import Method
from worker.batch import Batch
from worker.forwards import EagerForwards, Forwards
from worker.kv_pool import KvPool
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.rope import Rope

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def small_config(
    hidden_size: int, inner_size: int, head_dim: int, context: int, *, qk_norm: bool, biased: bool, window: int | None
) -> ModelConfig:
    """Of three layers, and six query heads that share two; the middle layer has the window."""
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=Rope(theta=10_000.0),
        context=context,
        windows=(None, window, None),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        qk_norm=qk_norm,
    )


def random_pool(decoder: Decoder, num_cells: int, seed: int) -> KvPool:
    config = decoder.config
    pool = KvPool(config.num_layers, num_cells, config.num_kv_heads, config.head_dim, torch.float32, CPU)
    torch.manual_seed(seed)
    pool.keys.normal_()
    pool.values.normal_()
    return pool


def check_against_torch(
    forwards: Callable[[Decoder, KvPool], Forwards], decoder: Decoder, batch: Batch, method: Method, num_cells: int
) -> None:
    """Logits of every row and all cells are those of the decoder in plain torch."""
    ours, theirs = (random_pool(decoder, num_cells, seed=3) for _ in range(2))
    rows = list(range(len(batch.tokens)))
    logits = forwards(decoder, ours).run(batch, method, rows).rows(rows)
    expected = EagerForwards(decoder, theirs).run(batch, method, rows).rows(rows)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
