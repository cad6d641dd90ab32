"""`raycomb serve` as a process of its own, and what can be seen of its processes from outside. No Ray in here."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.ports import own_ports
from tests.tiny_text import EOS, SPECIALS, TEMPLATE, tiny_tokenizer

ROOT = Path(__file__).parent.parent
MARK = "RAYCOMB_TEST_MARK"


def tiny_checkpoint(folder: Path) -> Path:
    """A checkpoint with a text side and no weights; the fake executor needs none."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    texts = {"chat_template": TEMPLATE, "bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


class ServiceProcess:
    """One run of the command, or of another `program` (a module and its first words) that serves as it does.

    All processes that it starts carry a mark in their environment. It leads a group of processes, as a job of a
    terminal does.
    """

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = ("cluster.cli", "serve"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.port, self.grpc_port = own_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        others = ("RAY_", "RAYCOMB_", "OTEL_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self._ray_folder = tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True)
        paths = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
        ours = {MARK: self.mark, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        ours["RAY_TMPDIR"] = self._ray_folder.name  # no other cluster of this machine finds ours by default
        command = [sys.executable, "-m", *program, *arguments, "--port", str(self.port)]
        command += ["--grpc-port", str(self.grpc_port)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | ours | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_line(self, part: str, timeout_s: float) -> str:
        """The first line from now on that holds `part`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {part!r} within {timeout_s} s in:\n{''.join(self.output)}") from None
            if not line:
                raise AssertionError(f"it ended before {part!r}:\n{''.join(self.output)}")
            if part in line:
                return line

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def signal_group(self, number: signal.Signals) -> None:
        """As a terminal or `timeout` does it, to whatever is still in the group that it leads."""
        os.killpg(self._process.pid, number)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        """Have it shut down, as from the terminal, which must succeed within the time."""
        self.signal(signal.SIGTERM)
        code = self.wait(timeout_s)
        assert code == 0, f"ended with code {code}:\n{''.join(self.output)}"

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Processes of this run whose title holds `title`, oldest first."""
        found = []
        for process in psutil.process_iter():
            try:
                if title in " ".join(process.cmdline()) and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return sorted(found, key=lambda process: process.create_time())

    def left(self, within_s: float = 0.0) -> list[str]:
        """Processes of this run that are there now, and so long after, as a person would have to know them."""
        deadline = time.monotonic() + within_s
        while (left := [_told(process) for process in self.processes()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def logged(self, part: str) -> list[str]:
        """Lines of the logs of its replicas that hold `part`."""
        files = Path(self._ray_folder.name).glob("ray/session_2*/logs/serve/replica_*.log")
        return [line for file in files for line in file.read_text().splitlines() if part in line]

    def ray_address(self) -> str:
        """Where the control store of its Ray cluster listens."""
        (raylet,) = self.processes("raylet/raylet ")
        return next(part for part in raylet.cmdline() if part.startswith("--gcs-address=")).partition("=")[2]

    def kill_rest(self) -> None:
        """End what a failed test may have left. Only processes of this run."""
        for process in self.processes():
            if process.is_running():
                process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._ray_folder.cleanup()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put("")  # it says no more


@contextmanager
def running_service(
    *arguments: str,
    program: Sequence[str] = ("cluster.cli", "serve"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServiceProcess]:
    service = ServiceProcess(*arguments, program=program, environment=environment)
    try:
        yield service
    finally:
        service.kill_rest()


def _told(process: psutil.Process) -> str:
    """What one needs to know of a process that should not be there."""
    try:
        with process.oneshot():
            age_s = time.time() - process.create_time()
            parent, state, words = process.ppid(), process.status(), " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return f"{process.pid}: has just ended"
    return f"{process.pid} (of {parent}, {state}, for {age_s:.0f} s): {words}"


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
