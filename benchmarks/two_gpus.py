"""Two GPUs under one router, on a local Ray cluster in which each worker has a GPU of its own.

* `cells`: a sequence's cells moved from one GPU to the other, by each way (`benchmarks.two_gpus_cells`).
* `mixed`: the mixed load at one worker and twice of it at two, through the same gateways (`benchmarks.two_gpus_mixed`).
* `losses`: a worker killed and a worker frozen under load (`benchmarks.two_gpus_losses`).
* `prefixes`: affinity against round robin (`benchmarks.two_gpus_prefixes`).
* `exact`: killed and frozen workers in float32, word for word (`benchmarks.two_gpus_exact`).

Each part runs in a process of its own and has its own time; what it has measured until a fault or the end of its time
stays. The result is recorded after each part, so whoever cuts the program short loses no other part's. NVLink multicast
stays off. `--scale dry` is the same program on two CPU workers, `small` finds faults on GPUs.

    python -m benchmarks.two_gpus --keep
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.record import record
from benchmarks.two_gpus_plan import PLANS, Note, Part, Plan, Scale

BAR_RATIO: Final = 1.95
GRACE_S: Final = 20.0
LOG_CHARACTERS: Final = 3000


class Figures:
    """A part's figures in a file, written anew whenever something is added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {}

    def add(self, **figures: Any) -> None:
        self._figures |= figures
        self._path.write_text(json.dumps(self._figures, indent=2), encoding="utf-8")


def run_part(part: Part, plan: Plan, path: Path) -> None:
    """In a process of its own: measure, and keep the figures in `path`."""
    with tempfile.TemporaryDirectory() as folder:
        _function_of(part)(plan, Path(folder), Figures(path).add)


def _function_of(part: Part) -> Callable[[Plan, Path, Note], None]:
    """Imported when it is wanted: only `cells` loads torch here."""
    match part:
        case Part.CELLS:
            from benchmarks.two_gpus_cells import cells

            return cells
        case Part.MIXED:
            from benchmarks.two_gpus_mixed import mixed

            return mixed
        case Part.LOSSES:
            from benchmarks.two_gpus_losses import losses

            return losses
        case Part.PREFIXES:
            from benchmarks.two_gpus_prefixes import prefixes

            return prefixes
        case Part.EXACT:
            from benchmarks.two_gpus_exact import exact

            return exact


def timed_part(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The part's figures, with how long it took, and with a `fault` where it did not come to its end."""
    path, limit_s = folder / f"{part}.json", PLANS[scale].limits_s[part]
    command = [sys.executable, "-m", "benchmarks.two_gpus", part, "--scale", scale, "--alone", str(path)]
    path.unlink(missing_ok=True)  # of an earlier run
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read()
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    figures["took_s"] = round(time.monotonic() - begun, 1)
    if code != 0:
        how = f"not done in {limit_s:g} s" if code is None else f"ended with code {code}"
        figures["fault"] = f"{how}: {said[-LOG_CHARACTERS:]}"
        path.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return figures


def misses(found: dict[str, dict[str, Any]]) -> list[str]:
    """What was not as wanted, in words; of the parts that ran."""
    missed = [f"{part}: {figures['fault'].splitlines()[0]}" for part, figures in found.items() if "fault" in figures]
    if (ratio := found.get(Part.MIXED, {}).get("ratio")) is not None and ratio < BAR_RATIO:
        missed.append(f"two workers give {ratio} times the tokens of one, and {BAR_RATIO} are wanted")
    for name, figures in found.get(Part.LOSSES, {}).items():
        if isinstance(figures, dict) and figures["whole"] != figures["streams"]:
            missed.append(f"{name}: {figures['whole']} of {figures['streams']} streams are whole")
    for name, figures in found.get(Part.EXACT, {}).items():
        if isinstance(figures, dict) and figures["differing"]:
            missed.append(f"exact, {name}: {len(figures['differing'])} answers differ")
    for name, figures in found.get(Part.CELLS, {}).items():
        if isinstance(figures, dict) and name.endswith("-float32") and "same_tokens" in figures:
            moved = {way: same for way, same in figures["same_tokens"].items() if way != "zeroed"}
            missed += [f"cells by {way}: the answer went on differently" for way, same in moved.items() if not same]
            if figures["same_tokens"]["zeroed"]:
                missed.append("cells full of zeros gave the same answer: the comparison shows nothing")
    return missed


def gpus() -> list[str]:
    """Names and drivers of the GPUs, and how they are linked, as the driver says; nothing without one."""
    said: list[str] = []
    for words in (["--query-gpu=name,driver_version,uuid", "--format=csv,noheader"], ["topo", "-m"]):
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return said
        said += [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    return said


def measure(parts: Sequence[Part], scale: Scale, folder: Path, *, keep: bool) -> bool:
    """Run the parts one after the other and record the result after each; whether nothing was missed."""
    nccl = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_SYMM", "NVSHMEM"))}
    config = PLANS[scale].as_config() | {"scale": scale, "parts": list(parts), "environment": nccl, "gpus": gpus()}
    name = "two_gpus" if len(parts) == len(Part) else f"two_gpus-{'-'.join(parts)}"
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        found[part.value] = timed_part(part, scale, folder)
        missed = misses(found)
        left_out = [str(other) for other in parts if other not in found]
        figures = found | {"missed": missed, "not_run": left_out, "met": not missed and not left_out}
        record(name, config, figures, keep=keep)
    return not misses(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=Part, metavar="|".join(Part), default=list(Part))
    parser.add_argument("--scale", type=Scale, default=Scale.FULL, choices=list(Scale))
    parser.add_argument("--out", type=Path, help="a folder for the figures of each part as they come")
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that services end with us
        run_part(args.parts[0], PLANS[args.scale], args.alone)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        return 0 if measure(args.parts, args.scale, out, keep=args.keep) else 1


if __name__ == "__main__":
    raise SystemExit(main())
