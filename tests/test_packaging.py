"""The distribution holds our packages and nothing else, and they are the ones that get imported."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("cluster", "worker", "planner", "protos")
CUSTOMARY = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml"}
FOLDERS = {*PACKAGES, "tests", "deploy", "docs", "benchmarks", ".ci"}


def test_the_wheel_holds_our_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.startswith("raycomb-")} == set(PACKAGES)
    assert {"protos/worker.proto", "planner/py.typed", "worker/models/__init__.py"} <= names


@pytest.mark.parametrize("package", PACKAGES)
def test_the_imported_package_is_ours(package: str) -> None:
    assert Path(str(importlib.import_module(package).__file__)).parent == ROOT / package


def test_no_module_is_named_like_the_standard_library_or_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {line.split("[")[0].split(">")[0].split("=")[0] for line in project["dependencies"]}
    assert not set(PACKAGES) & (set(sys.stdlib_module_names) | needed)


def test_everything_that_gets_installed_is_pinned() -> None:
    pins = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["test"], *extras["docs"], *extras["plot"]]
    unpinned = {name for name in needed_by(asked) if name not in pins and name != "raycomb"}
    assert not {name for name in unpinned if not name.startswith(("nvidia-", "triton"))}  # those are torch's own choice


def needed_by(asked: list[str]) -> set[str]:
    """Names of what the requirements need here, and what these need in turn, as far as it is installed."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in asked]
    while waiting:
        one = waiting.pop()
        for extra in ("", *sorted(one.extras)):
            known = (canonicalize_name(one.name), extra)
            if known in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
                continue
            found.add(known)
            for line in installed_requirements(one.name):
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    needed.marker = None  # said yes already
                    waiting.append(needed)
    return {name for name, _ in found}


def installed_requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_only_the_fixed_and_customary_entries_stand_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert tops <= CUSTOMARY | FOLDERS | {".gitignore"}
