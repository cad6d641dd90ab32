"""What a command leaves of its own when it has ended: such processes are waited for, and ended where they do not end.

Ray ends its first processes of a host, and the others notice by themselves that they are alone. But they run at a low
priority, as HAProxy and its watch do: on a busy host they seldom get the processor, and one that is stopped, or still
starts, notices nothing. Whoever starts the service again, or counts what is left, is told that it has ended when it
has. Linux only: elsewhere nothing is adopted, and so nothing waited for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 5.0
"""Whatever has not ended by itself so long after the command is killed."""
KILL_WITHIN_S: Final = 60.0
"""What was killed ends as soon as it gets the processor; what does not is stuck in the kernel."""
LOOK_S: Final = 0.05
_PR_SET_CHILD_SUBREAPER: Final = 36


def prctl(option: int, value: int) -> bool:
    """Tell the kernel how to treat this process; False where there is no such call, which only Linux has."""
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    return True


def adopt_orphans() -> None:
    """Become the parent of all descendants of this process whose own parent ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Processes that this one is the parent of, those included that have ended and that nobody has taken."""
    own, found = str(os.getpid()), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone by now
            _, _, rest = (folder / "stat").read_text().rpartition(")")  # a name may hold any character
            if rest.split()[1] == own:
                found.add(int(folder.name))
    return found


def see_off(spared: Collection[int]) -> list[str]:
    """Return when no child is left but those in `spared`; what would not end even when it was killed."""
    killed_from = time.monotonic() + PATIENCE_S
    while left := [child for child in children() if child not in spared and not _has_ended(child)]:
        if time.monotonic() >= killed_from + KILL_WITHIN_S:
            return [_told(child) for child in left]
        if time.monotonic() >= killed_from:
            for child in left:
                os.kill(child, signal.SIGKILL)  # a child that nobody has taken keeps its number
        time.sleep(LOOK_S)
    return []


def _has_ended(child: int) -> bool:
    """Takes it, if so."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


def _told(child: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{child} ({words.strip()})"
    return str(child)
