"""Ports for tests that start servers: each process of a test run has a range of its own to choose from."""

from __future__ import annotations

import os

from cluster.serving.front import PORTS_TO_CHOOSE_FROM, free_ports

_MOST_PROCESSES = 20


def own_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, and that no other process of this run chooses before they are used."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_PROCESSES
    size = len(PORTS_TO_CHOOSE_FROM) // _MOST_PROCESSES
    return free_ports(count, PORTS_TO_CHOOSE_FROM[process * size : (process + 1) * size])
