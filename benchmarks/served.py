"""A server of its own process for as long as a benchmark needs it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_WITHIN_S = 300
GONE_WITHIN_S = 60


@contextmanager
def served(module: str, words: Sequence[str], *, port: int, log: Path) -> Iterator[str]:
    """Run `python -m module words --port port` until the block ends; gives its base URL once `/ready` answers.

    What the server prints goes to `log`. Raises `RuntimeError` when it ends early or is not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", module, *words, "--port", str(port)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            _wait_ready(process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GONE_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready after {READY_WITHIN_S} s:\n{log.read_text()[-2000:]}")
