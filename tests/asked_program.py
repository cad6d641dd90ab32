"""A program in a process of its own that answers each line on its input with one line of JSON: Ray wants it apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class AskedProgram:
    """The asking side. Blocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> dict[str, Any]:
        """Raises `RuntimeError` if the program has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the program that asks has ended")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def asked_program(module: str, *arguments: str) -> Iterator[AskedProgram]:
    """Run `python -m module arguments` until the block ends."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield AskedProgram(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # its loop ends
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
