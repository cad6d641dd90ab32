"""What compiling a program needs of the machine: a C++ compiler and, for a GPU, CUDA's toolkit and its driver."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.errors import InvalidConfiguration

_LIBRARY_PATH = "LIBRARY_PATH"
"""Where compilers look for libraries that they are to link with, beside their own places."""


def check_compiler(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `InvalidConfiguration` where nothing compiles C++ here: what CXX names, else g++."""
    name = environment.get("CXX") or "g++"
    if shutil.which(name) is None:
        raise InvalidConfiguration(
            f"exporting compiles C++, and this machine has no {name}: install one, or name another in CXX",
            param="output",
        )


@contextmanager
def compiling_for(device: torch.device) -> Iterator[None]:
    """While this lasts, what is compiled for `device` finds what it is to be linked with.

    Code for a GPU is linked with the driver's library by a name that only CUDA's toolkit gives it, in a place that is
    looked at only where CUDA_HOME says so; here it has that name beside it. Where this process does not say where the
    driver's library is, the linker is left to find it. Raises `InvalidConfiguration` where there is no toolkit.
    """
    if device.type != "cuda":
        yield
        return
    _check_toolkit()
    before = os.environ.get(_LIBRARY_PATH)
    with tempfile.TemporaryDirectory(prefix="raycomb-libcuda-") as folder:
        if (library := driver_library(Path("/proc/self/maps").read_text())) is not None:
            (Path(folder) / "libcuda.so").symlink_to(library)
        os.environ[_LIBRARY_PATH] = folder if before is None else f"{folder}:{before}"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_LIBRARY_PATH]
            else:
                os.environ[_LIBRARY_PATH] = before


def driver_library(maps: str) -> Path | None:
    """The driver's library among those that this process has mapped, as it has where weights are on the device; `maps`
    as Linux lists them."""
    for line in maps.splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcuda.so"):
            return path
    return None


def _check_toolkit() -> None:
    from torch.utils.cpp_extension import CUDA_HOME  # looked for when this is imported

    if CUDA_HOME is None:
        raise InvalidConfiguration(
            "exporting for a GPU compiles against CUDA's headers, and CUDA's toolkit is in none of the usual places: "
            "install it, or say in CUDA_HOME where it is",
            param="device",
        )
