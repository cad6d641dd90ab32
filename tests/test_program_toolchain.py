"""What a machine must have to compile programs, and how it is told what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from planner.errors import InvalidConfiguration
from worker.programs.toolchain import check_compiler, compiling_for, driver_library

MAPS = """\
55d0c8a00000-55d0c8a01000 r--p 00000000 08:01 1234 /usr/bin/python3.12
7f2b9c000000-7f2b9c021000 rw-p 00000000 00:00 0
7f2b9d400000-7f2b9d600000 r-xp 00000000 00:31 77 /usr/local/nvidia/lib 64/libcuda.so.580.159.03
7f2b9e000000-7f2b9e100000 r-xp 00000000 08:01 78 /usr/lib/libcudart.so.13
"""


def archive_of_the_library() -> str:
    """Its path, where there is g++ and it has one."""
    if shutil.which("g++") is None:
        return ""
    asked = subprocess.run(["g++", "-print-file-name=libstdc++.a"], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


def test_a_machine_without_a_compiler_is_told_so() -> None:
    with pytest.raises(InvalidConfiguration, match="has no no-such-compiler: install one, or name another in CXX"):
        check_compiler({"CXX": "no-such-compiler"})


def test_the_drivers_library_is_the_one_that_this_process_uses() -> None:
    assert driver_library(MAPS) == Path("/usr/local/nvidia/lib 64/libcuda.so.580.159.03")


def test_a_process_without_the_driver_knows_none() -> None:
    assert driver_library(MAPS.replace("libcuda.so", "libother.so")) is None


def test_compiling_for_a_cpu_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    with compiling_for(torch.device("cpu")):
        assert dict(os.environ) != before
    assert dict(os.environ) == before


@pytest.mark.skipif(not Path(archive_of_the_library()).is_file(), reason="g++ has no archive of its library")
def test_code_that_is_linked_with_an_archive_of_the_library_keeps_it_to_itself(tmp_path: Path) -> None:
    """Else this process's library and the archive's would be mixed when the code is loaded."""
    source = tmp_path / "code.cpp"
    source.write_text('#include <locale>\nextern "C" bool is_classic() { return std::locale() == std::locale(""); }\n')

    def shown() -> list[str]:
        library = tmp_path / "code.so"
        command = ["g++", "-shared", "-fPIC", "-static-libstdc++", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
        )
        return [line.split()[-1] for line in listed.stdout.splitlines()]

    assert "_ZNSt6locale7classicEv" in shown()
    with compiling_for(torch.device("cpu")):
        assert "_ZNSt6locale7classicEv" not in shown()
        assert "is_classic" in shown()


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("ld") is None, reason="there is no g++, or no ld")
def test_a_linker_may_lie_in_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'of "$HOME" and others\''
    folder.mkdir()
    (folder / "ld").symlink_to(str(shutil.which("ld")))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    source = tmp_path / "code.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    with compiling_for(torch.device("cpu")):
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "code.so")], check=True)


@pytest.mark.skipif(CUDA_HOME is not None, reason="this machine has CUDA's toolkit")
def test_a_machine_without_the_toolkit_is_told_so() -> None:
    with (
        pytest.raises(InvalidConfiguration, match="install it, or say in CUDA_HOME where it is"),
        compiling_for(torch.device("cuda")),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_with_a_device_knows_its_driver() -> None:
    torch.cuda.synchronize()
    library = driver_library(Path("/proc/self/maps").read_text())
    assert library is not None
    assert library.is_file()
