"""One dated file for each result, with everything that is needed to judge it: hardware, versions, configuration."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "raycomb",
    "ray",
    "torch",
    "numpy",
    "numba",
    "grpcio",
    "starlette",
    "uvicorn",
    "transformers",
    "triton",
    "vllm",
)


def record(name: str, config: Mapping[str, Any], figures: Mapping[str, Any], *, keep: bool) -> None:
    """Print the result as the last line; with `keep`, write `results/DATE-NAME.json` too, over an earlier one of the
    same day."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    result = {
        "benchmark": name,
        "date": today,
        "figures": dict(figures),
        "config": dict(config),
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()},
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }
    if keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{today}-{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
