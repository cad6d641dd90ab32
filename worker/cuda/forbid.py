"""Leaves no chance, in logits on the GPU, to what grammars do not allow: one bit a token, read where it is needed.

What `worker.sampler.forbid` does in plain torch. Runs in Triton's interpreter too.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.masks import BitMask

_BLOCK = 4096


def forbid_rows(logits: Tensor, masks: Mapping[int, BitMask], upload: Callable[[npt.NDArray[Any]], Tensor]) -> None:
    """Put -infinity, in float32[N, vocab_size], rows contiguous, where the mask of a row does not allow the token; ids
    beyond a mask's end are not allowed either. `masks` by row; all have one length. `upload` brings an array to the
    device of `logits` without waiting for it."""
    if not masks:
        return
    bits = np.stack(list(masks.values()))
    packed, rows = upload(bits), upload(np.array(list(masks), dtype=np.int32))
    vocab_size = logits.shape[1]
    _forbid_kernel[(triton.cdiv(vocab_size, _BLOCK), len(masks))](
        logits, rows, packed, logits.stride(0), vocab_size, bits.shape[1], BLOCK=_BLOCK, num_warps=4
    )


def compile_forbid(vocab_size: int, device: torch.device) -> None:
    """Compile what `forbid_rows` launches, for any rows and masks, so that the first answer by a grammar keeps nobody
    waiting."""
    everything = np.full(-(-vocab_size // 8), 255, dtype=np.uint8)
    logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
    forbid_rows(logits, {0: everything}, lambda values: torch.from_numpy(values).to(device))


@triton.jit(do_not_specialize=["row_stride", "vocab_size", "num_bytes"])
def _forbid_kernel(logits, rows, packed, row_stride, vocab_size, num_bytes, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1)
    row = tl.load(rows + place)
    byte = token // 8
    bits = tl.load(packed + place * num_bytes + byte, mask=byte < num_bytes, other=0).to(tl.int32)
    is_allowed = ((bits >> (token % 8)) & 1) != 0
    at = logits + row.to(tl.int64) * row_stride + token
    tl.store(at, float("-inf"), mask=(token < vocab_size) & (is_allowed == 0))
