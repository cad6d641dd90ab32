"""What this machine offers to an engine: a device, and memory for its pool."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

# Unless told otherwise a pool holds this many full contexts, if a quarter of the free memory does.
_DEFAULT_CONTEXTS = 8
_MEMORY_SHARE = 0.25


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `InvalidConfiguration` where CUDA was asked for and is not there."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfiguration("device is cuda, but this machine has no usable CUDA device", param="device")
    return torch.device(config.device)


def default_cells(context: int, cell_bytes: int, device: torch.device) -> int:
    """Cells of a pool when nobody says how many."""
    affordable = int(_free_bytes(device) * _MEMORY_SHARE) // cell_bytes
    return max(1, min(_DEFAULT_CONTEXTS * context, affordable))


def host_bytes() -> int:
    """Of the machine's memory, whoever has it now."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Linux says what could be freed; elsewhere all pages must do, as free ones alone exclude the file cache.
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return host_bytes()
