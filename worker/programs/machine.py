"""What compiled code depends on: the processor's or GPU's abilities, and torch's version."""

from __future__ import annotations

import torch


def platform_of(device: torch.device) -> tuple[str, ...]:
    """What code that is compiled here for `device` may use: a processor's instruction sets, or a GPU's architecture."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (f"sm_{major}{minor}",)
    abilities = torch.cpu.get_capabilities()
    there = sorted(name for name, value in abilities.items() if value is True)
    return (str(abilities["architecture"]), *there)


def torch_version() -> str:
    """Without the build's own suffix: a CPU's build and a GPU's run the same program for the CPU."""
    return torch.__version__.partition("+")[0]
