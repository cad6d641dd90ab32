"""How many GPUs Ray will find on this machine, known before it starts. Free of Ray and torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

DRIVER_LIBRARY: Final = "libnvidia-ml.so.1"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def num_gpus(environment: Mapping[str, str] = os.environ, library: str = DRIVER_LIBRARY) -> int:
    """Those that NVIDIA's driver tells of, but no more than `environment` lets be seen: as Ray counts them."""
    return visible_of(_of_driver(library), environment)


def visible_of(found: int, environment: Mapping[str, str]) -> int:
    """Of so many, those that the environment lets programs see."""
    visible = environment.get(VISIBLE)
    if visible is None:
        return found
    return 0 if visible in ("", "NoDevFiles") else min(found, len(visible.split(",")))


def _of_driver(library: str) -> int:
    """0 where there is no driver, or it does not answer."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if driver.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        driver.nvmlShutdown()
