"""Rotary position embedding (Su et al. 2021): its scaling rules, as values. Free of torch; tables: `rope_tables`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: long waves are divided by `factor`, short ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): dimensions are interpolated or kept by how often they turn in the original context.

    `magnitude` multiplies cosine and sine (the paper's temperature).
    """

    factor: float
    original_context: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """A checkpoint's own list: frequency i is divided by `divisors[i]` (GGUF keeps Llama 3.1's rule in this form)."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Base of the frequencies, and how they are scaled to a longer context (None: not at all)."""

    theta: float
    scaling: RopeScaling | None = None


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's default for the magnitude of cosine and sine."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
