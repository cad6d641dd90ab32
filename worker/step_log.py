"""A planner's journal as a file: one line a call, with its time. Bounded, and readable by its owner alone."""

from __future__ import annotations

import json
import os
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from planner.errors import InvalidConfiguration

MAX_BYTES: Final = 2**30
FLUSH_S: Final = 1.0


class StepLog:
    """Owner: the engine thread. When `max_bytes` are written it writes nothing more: what is there can be replayed."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Makes folder and file; an older file of that name is overwritten. Raises `InvalidConfiguration`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise InvalidConfiguration(f"the step log {path} cannot be written: {error}", param="step_log") from error
        self._file: TextIOWrapper = os.fdopen(descriptor, "w", encoding="utf-8", buffering=2**16)
        self._left = max_bytes
        self._flushed_at = time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        if self._left <= 0:
            return
        text = json.dumps({"at": round(time.time(), 6), **line}, separators=(",", ":")) + "\n"
        self._left -= len(text)
        self._file.write(text)
        if time.monotonic() - self._flushed_at > FLUSH_S or self._left <= 0:
            self.flush()

    def flush(self) -> None:
        """What was written is in the file. To be called before the engine waits: no later line would bring it there."""
        self._file.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self._file.close()
