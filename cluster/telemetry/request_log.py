"""The file with a line of JSON for each request that asks for tokens. What is in a line:
`cluster.telemetry.request_record`.

A service may write thousands a second, so they do not go through Python's logging: Serve's log takes some 50 us of a
gateway's processor for a line, most of it for what is the same in all of them. Their file lies beside that of Serve's.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Tell = Callable[[dict[str, Any]], None]
"""Takes what is told of one request."""


class RequestLog:
    """Owner: a gateway's event loop. A file that would grow above `max_bytes` (0: none does) is put aside as PATH.1,
    the one before as PATH.2, up to `num_kept`. Where the disk takes no more it ends, and the process' log says so."""

    def __init__(self, path: Path, max_bytes: int, num_kept: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._file: FileIO | None = FileIO(path, "a")
        self._num_bytes = path.stat().st_size

    def write(self, told: dict[str, Any]) -> None:
        """One line of this, with the time."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, **told}).encode() + b"\n"
        try:
            if 0 < self._max_bytes < self._num_bytes + len(line):
                self._file = self._put_aside(self._file)
            self._file.write(line)
            self._num_bytes += len(line)
        except OSError as error:
            logger.error("no request is logged any more: %s cannot be written: %s", self.path, error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put_aside(self, file: FileIO) -> FileIO:
        """A new file in the place of this one."""
        file.close()
        places = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._num_kept + 1))]
        for newer, older in reversed(list(itertools.pairwise(places))):
            if newer.exists():
                newer.replace(older)
        self._num_bytes = 0
        return FileIO(self.path, "w")


def request_log_beside(log: logging.Logger) -> RequestLog | None:
    """A file beside that of `log`, as large and kept as long; None where that does not take INFO or goes to no file."""
    for handler in log.handlers:
        file = handler.target if isinstance(handler, MemoryHandler) else handler
        if isinstance(file, RotatingFileHandler) and log.isEnabledFor(logging.INFO):
            path = Path(file.baseFilename)
            return RequestLog(path.with_name(f"{path.stem}_requests{path.suffix}"), file.maxBytes, file.backupCount)
    return None
