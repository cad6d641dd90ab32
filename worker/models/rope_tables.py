"""The frequencies of each rotary scaling rule, and the tables a decoder reads.

The arithmetic is float32 throughout, in the order that transformers uses: at position 8000 one unit in the last place
of a frequency is already 5e-4 radians, so a more precise table would be a different model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.models.rope import DivisorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32[head_dim / 2], radians per position."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    plain = 1.0 / powers
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DivisorScaling(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(powers, rope.theta, head_dim, scaling)


def rope_tables(rope: Rope, head_dim: int, context: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32[context, head_dim / 2] each, for positions 0 .. context - 1."""
    angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling) else 1.0
    return angles.cos().mul_(magnitude), angles.sin().mul_(magnitude)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wave_length = 2 * math.pi / plain
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_divided = scaling.original_context / scaling.low_freq_factor
    kept_share = (scaling.original_context / wave_length - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    divided = plain / scaling.factor
    blended = (1 - kept_share) * divided + kept_share * plain
    return torch.where(wave_length > shortest_divided, divided, torch.where(wave_length < longest_kept, plain, blended))


def _yarn(powers: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    def dimension_turning(times: float) -> float:
        return head_dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept_share = 1 - divided_share
    return (1.0 / (scaling.factor * powers)) * (1 - kept_share) + (1.0 / powers) * kept_share
