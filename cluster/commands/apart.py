"""A command in a group of processes of its own, so that only this one hears what a terminal or `timeout` tells a group.

Ray's processes are in the group of the one that started them, and end at once when they are told to: a service whose
whole group is told cannot drain. So `raycomb serve` runs in a child that leads another group, and its parent passes
signals on and waits, also for what the child leaves. Where the parent is gone the child is told to end. A child that is
deep in a library hears no signal, so the third one kills it. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Final

from cluster.commands.leftovers import adopt_orphans, children, prctl, see_off

_HEARD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
SAME_WISH_S: Final = 0.5
"""`timeout` and its like tell a process and then its whole group: what comes so soon is no other wish."""
WISHES_THAT_KILL: Final = 3
EXIT_CODE_OF_SIGNALS: Final = 128
"""And the signal's number: of what was ended by one, as shells tell it."""
_PR_SET_PDEATHSIG: Final = 1


def run_apart() -> int | None:
    """Fork. In the child: None, at once. In the parent: the child's exit code, when it and all that it has started have
    ended."""
    parent = os.getpid()
    strangers = children()  # of whatever this program took the place of
    adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # else the kernel might not tell of the child's end
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        return None
    wishes: list[float] = []
    while True:
        # Taken one after the other, and not by handlers: what comes just before a wait would not end it.
        heard = signal.sigwait(_HEARD)
        if heard == signal.SIGCHLD:
            if (code := _exit_code_of(child)) is not None:
                return _after_the_rest(code, strangers)
        elif not wishes or time.monotonic() > wishes[-1] + SAME_WISH_S:
            wishes.append(time.monotonic())
            os.kill(child, heard if len(wishes) < WISHES_THAT_KILL else signal.SIGKILL)


def _after_the_rest(code: int, strangers: set[int]) -> int:
    """The exit code once nothing is left but `strangers`; never that of a success where something is."""
    if left := see_off(strangers):
        print(f"raycomb: these processes do not end: {', '.join(left)}", file=sys.stderr, flush=True)
        return code or 1
    return code


def _exit_code_of(child: int) -> int | None:
    """None while it runs. The first process of a container is given the orphans of all others: those that ended are
    taken, too, else they would stay."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            return None
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else EXIT_CODE_OF_SIGNALS - code


def _end_with(parent: int) -> None:
    """Have the kernel tell this process to end when its parent has, which only Linux does."""
    if prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and os.getppid() != parent:  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)
