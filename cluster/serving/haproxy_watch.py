"""What stands beside each HAProxy that Serve starts, and ends it when nothing is left to serve.

HAProxy is the grandchild of a raylet. A raylet that ends, however it does, ends the processes that it started, but not
those that they started: HAProxy would keep the ports, for nobody. So `cluster.serving.haproxy_script` starts this file,
by its path and without the packages beside it, for as long as that HAProxy runs, and deaf to signals that may be meant
for all processes of a service. Not for an orderly end, at which Serve ends HAProxy itself. Linux (5.3 or newer) only,
as the package of HAProxy is.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

GRACE_S: Final = 2.0
"""HAProxy ends at once when it is told to. One that does not, since it is stopped or hangs, is killed after so long."""


def watch(haproxy: int, owner: int, folder: Path | None) -> None:
    """Return when the process `haproxy` is gone, as one that only checks a configuration may be by now; end it when the
    process `owner` is, and remove `folder` then.

    Both are held by descriptors, so that another process which gets the number of one is never mistaken for it.
    """
    with _process(haproxy) as watched, _process(owner) as owned:
        if owned is not None and (watched is None or owned not in _ended([watched, owned], None)):
            return
        if watched is not None:
            _end(watched)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not _ended([process], GRACE_S):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            _ended([process], GRACE_S)


@contextmanager
def _process(number: int) -> Iterator[int | None]:
    """A descriptor of the process of that number, as long as the block lasts; None where it is gone already, also where
    its number lives on as that of a group."""
    try:
        descriptor = os.pidfd_open(number)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _ended(processes: Sequence[int], within_s: float | None) -> list[int]:
    """Wait until one of them has ended, or the time is over; those that have."""
    poll = select.poll()
    for descriptor in processes:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if within_s is None else within_s * 1000)]


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
