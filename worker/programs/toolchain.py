"""What compiling a program needs of the machine: a C++ compiler and, for a GPU, CUDA's toolkit and its driver."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.errors import InvalidConfiguration

_LIBRARY_PATH, _COMPILER_PATH = "LIBRARY_PATH", "COMPILER_PATH"
"""Where compilers look for libraries that they are to link with, and for programs that they call, beside their own
places."""

_LINKER = """\
#!/bin/sh
exec {linker} "$@" --exclude-libs libstdc++.a
"""


def check_compiler(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `InvalidConfiguration` where nothing compiles C++ here: what CXX names, else g++."""
    name = _compiler(environment)
    if shutil.which(name) is None:
        raise InvalidConfiguration(
            f"exporting compiles C++, and this machine has no {name}: install one, or name another in CXX",
            param="output",
        )


def _compiler(environment: Mapping[str, str]) -> str:
    return environment.get("CXX") or "g++"


@contextmanager
def compiling_for(device: torch.device) -> Iterator[None]:
    """While this lasts, what is compiled for `device` is linked with what it is to be linked with, as told through the
    environment.

    Some compilers have C++'s own library as an archive only. Code that is linked with it keeps what it has of it to
    itself: it would be mixed with this process's library otherwise, which ends in a fault when the code is loaded.

    Code for a GPU is linked with the driver's library by a name that only CUDA's toolkit gives it, in a place that is
    looked at only where CUDA_HOME says so; here it has that name beside it. Where this process does not say where the
    driver's library is, the linker is left to find it. Raises `InvalidConfiguration` where there is no toolkit.
    """
    if device.type == "cuda":
        _check_toolkit()
    with tempfile.TemporaryDirectory(prefix="raycomb-link-") as name:
        folder = Path(name)
        if (linker := _linker()) is not None:
            (folder / "ld").write_text(_LINKER.format(linker=shlex.quote(linker)))
            (folder / "ld").chmod(0o755)
        library = driver_library(Path("/proc/self/maps").read_text()) if device.type == "cuda" else None
        if library is not None:
            (folder / "libcuda.so").symlink_to(library)
        with _searched_first(folder):
            yield


def _linker() -> str | None:
    """What the compiler calls; None where it does not say."""
    asked = subprocess.run([_compiler(os.environ), "-print-prog-name=ld"], capture_output=True, text=True, check=False)
    return shutil.which(asked.stdout.strip()) if asked.returncode == 0 else None


@contextmanager
def _searched_first(folder: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (_LIBRARY_PATH, _COMPILER_PATH)}
    os.environ.update({name: f"{folder}:{paths}" if paths else str(folder) for name, paths in before.items()})
    try:
        yield
    finally:
        for name, paths in before.items():
            if paths is None:
                del os.environ[name]
            else:
                os.environ[name] = paths


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
