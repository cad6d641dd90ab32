"""`raycomb explain`: replays a recorded step log through the planner, offline, and says why each step was as it was."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from planner.account import StepAccount
from planner.errors import InvalidConfiguration, InvalidStepLog
from planner.replay import ReplayedStep, replay

MAX_CHUNKS_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG", help="a file that `raycomb serve --step-log` wrote")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--last", type=int, metavar="N", help="only the last N steps")
    chosen.add_argument("--step", type=int, metavar="N", help="only the step of this number")
    parser.add_argument("--json", action="store_true", help="one JSON object a step")


def execute(args: argparse.Namespace) -> int:
    """The exit code: 1 where the planner of this version plans otherwise than the record.

    Raises `InvalidStepLog` for a file that is none or has no such step, and `InvalidConfiguration`.
    """
    if args.last is not None and args.last < 1:
        raise InvalidConfiguration(f"--last must be at least 1, not {args.last}", param="last")
    num_other, num_steps = 0, 0
    for step in _chosen(_steps(args.log), args):
        print(json.dumps(asdict(step)) if args.json else told(step))
        num_steps += 1
        num_other += not step.as_recorded
    if not num_steps and args.step is not None:
        raise InvalidStepLog(f"{args.log} has no step {args.step}")
    if not args.json:
        print(f"{num_steps} steps replayed, {num_other} of them otherwise than recorded")
    return 1 if num_other else 0


def _steps(log: Path) -> Iterator[ReplayedStep]:
    """All steps of the file. Raises `InvalidStepLog` that names it."""
    try:
        with log.open(encoding="utf-8") as lines:
            yield from replay(lines)
    except OSError as error:
        raise InvalidStepLog(f"{log} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidStepLog(f"{log} is no step log: it is not text in UTF-8") from error
    except InvalidStepLog as error:
        raise InvalidStepLog(f"{log}: {error.message}") from error


def _chosen(steps: Iterable[ReplayedStep], args: argparse.Namespace) -> Iterator[ReplayedStep]:
    if args.step is not None:
        steps = (step for step in steps if step.account.number == args.step)
    yield from steps if args.last is None else deque(steps, maxlen=args.last)


def told(step: ReplayedStep) -> str:
    """For people: the step, its forwards, and its chunks, those that decode together on one line."""
    account, before = step.account, step.before
    lines = [
        f"step {account.number}: {account.num_tokens} tokens of {len(account.chunks)} sequences; before it "
        f"{before.num_running} ran, {before.num_waiting} waited, {before.free_cells} of {before.capacity} cells free"
    ]
    if not step.as_recorded:
        lines.append("  OTHERWISE than recorded: another version, or other settings")
    if account.swapped_out or account.swapped_in:
        lines.append(f"  first {account.swapped_out} cells go to host memory, and {account.swapped_in} come back")
    lines += [
        f"  {piece.method} of tokens [{piece.offset}, {piece.offset + piece.length}): {piece.why}"
        for piece in account.slices
    ]
    return "\n".join(lines + _chunk_lines(account))


def _chunk_lines(account: StepAccount) -> list[str]:
    by_reason: dict[str, list[int]] = {}
    for chunk in account.chunks:
        by_reason.setdefault(chunk.why, []).append(chunk.sequence)
    lines = []
    for why, sequences in by_reason.items():
        shown = ", ".join(map(str, sequences[:MAX_CHUNKS_SHOWN]))
        more = f" and {len(sequences) - MAX_CHUNKS_SHOWN} more" if len(sequences) > MAX_CHUNKS_SHOWN else ""
        lines.append(f"  sequence {shown}{more}: {why}")
    return lines
