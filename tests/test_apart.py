"""A command in a group of its own: its parent passes signals on, and neither outlives the other for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.commands.apart import SAME_WISH_S
from cluster.commands.leftovers import PATIENCE_S
from tests.service_process import wait_until

ROOT = Path(__file__).parent.parent
PROGRAM = """
import os, signal, sys, time
from cluster.commands.apart import run_apart

ended = run_apart()
if ended is not None:
    sys.exit(ended)

def told(number, frame):
    print("told", number, flush=True)
    sys.exit(7)

signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
print("child", os.getpid(), os.getpgrp(), flush=True)
ends_at = time.monotonic() + 60
while time.monotonic() < ends_at:
    time.sleep(60)
"""


class Apart:
    """The program above, leading a group as a job of a terminal does."""

    def __init__(self, program: str = PROGRAM) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert self.parent.stdout is not None
        _, pid, group = self.parent.stdout.readline().split()
        self.child = psutil.Process(int(pid))
        self.group = int(group)

    def ended(self) -> tuple[int, str]:
        output, _ = self.parent.communicate(timeout=20)
        return self.parent.returncode, output


def test_a_signal_to_the_whole_group_reaches_the_child_once() -> None:
    one = Apart()
    assert one.group == one.child.pid != one.parent.pid
    os.killpg(one.parent.pid, signal.SIGTERM)
    assert one.ended() == (7, f"told {signal.SIGTERM.value}\n")


def test_ctrl_c_is_passed_on() -> None:
    one = Apart()
    one.parent.send_signal(signal.SIGINT)
    assert one.ended() == (7, f"told {signal.SIGINT.value}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell")
def test_a_child_whose_parent_is_killed_is_told_to_end() -> None:
    one = Apart()
    one.parent.kill()
    assert one.ended() == (-signal.SIGKILL, f"told {signal.SIGTERM.value}\n")
    wait_until(lambda: not one.child.is_running(), 10, "the child has ended")


DEAF = PROGRAM.replace("    sys.exit(7)", "    return")


def test_a_child_that_does_not_end_is_killed_by_the_third_wish() -> None:
    one = Apart(DEAF)
    for _ in range(3):
        one.parent.send_signal(signal.SIGINT)
        one.parent.send_signal(signal.SIGTERM)  # so soon that it is the same wish
        time.sleep(SAME_WISH_S + 0.1)
    code, output = one.ended()
    assert (code, output.count("told")) == (128 + signal.SIGKILL, 2)


def test_what_ended_the_child_is_the_exit_code_as_shells_tell_it() -> None:
    one = Apart()
    one.child.kill()
    assert one.ended() == (128 + signal.SIGKILL, "")


LEAVES = """
import os, subprocess, sys
from pathlib import Path
from cluster.commands.apart import run_apart

folder = Path(sys.argv[1])
before = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(folder / "before").write_text(str(before.pid))
ended = run_apart()
if ended is not None:
    sys.exit(ended)

# Its parent ends before it does, and it is in a session of its own, as what a raylet starts may be.
child = "import os, sys; os.setsid(); os.fork() or os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
subprocess.run([sys.executable, "-c", child, sys.argv[2], sys.argv[1]], check=True)
sys.exit(int(sys.argv[3]))
"""
TELLS = "import os, signal, sys, time; from pathlib import Path; folder = Path(sys.argv[1]); "
TELLS += "(folder / 'left').write_text(str(os.getpid())); "


def after_leaving(folder: Path, program: str, code: int) -> bool:
    """Whether a process of this `program`, left by a command that ends with `code`, is there when that has ended. What
    was there before the command is, and none of its business."""
    command = [sys.executable, "-c", LEAVES, str(folder), TELLS + program, str(code)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    before = psutil.Process(int((folder / "before").read_text()))
    assert before.status() == psutil.STATUS_SLEEPING
    before.kill()
    assert (told.returncode, told.stderr) == (code, "")
    left = folder / "left"
    return left.exists() and psutil.pid_exists(int(left.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must give orphans to it")
def test_what_the_child_leaves_may_end_by_itself_and_is_waited_for(tmp_path: Path) -> None:
    assert not after_leaving(tmp_path, "time.sleep(1); (folder / 'ended').touch()", code=0)
    assert (tmp_path / "ended").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must give orphans to it")
@pytest.mark.parametrize(
    "program", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["goes on", "stopped"]
)
def test_what_the_child_leaves_and_does_not_end_is_killed(tmp_path: Path, program: str) -> None:
    started_at = time.monotonic()
    assert not after_leaving(tmp_path, program, code=3)
    assert time.monotonic() - started_at >= PATIENCE_S
