"""The pieces of a decoder layer: plain functions of tensors.

Shape letters: T tokens of the forward, H query heads, J key/value heads, D head dimension, E hidden size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang, Sennrich 2019) over the last axis."""
    return functional.rms_norm(x, (weight.shape[0],), weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `heads` [T, N, D] with `cos`, `sin` [T, D / 2]; element i pairs with i + D / 2."""
    num_tokens, num_heads, head_dim = heads.shape
    halves_tnd = heads.view(num_tokens, num_heads, 2, head_dim // 2)
    cos, sin = cos[:, None, None, :], sin[:, None, :]
    rotated = halves_tnd * cos
    rotated[:, :, 0].addcmul_(halves_tnd[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(halves_tnd[:, :, 0], sin)
    return rotated.view(num_tokens, num_heads, head_dim)
