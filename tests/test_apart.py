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
