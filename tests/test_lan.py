"""The hosts that tests make: they are apart, they can lose their cable and their life, and nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.lan import Host, lan, why_no_hosts
from tests.ray_up_rig import furnish, make_keys

OBSTACLE: Final = why_no_hosts()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or "")

REACH: Final = "bash -c 'exec 3<>/dev/tcp/{}/22'"


def test_hosts_are_apart_and_joined_by_their_cables_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with lan(tmp_path, [Path(sys.prefix), Path(sys.base_prefix)]) as network:
        left, right = network.add("left"), network.add("right")
        for host in (left, right):
            furnish(host.home, tmp_path / "keys")
            network.start(host)
        assert left.run("hostname; touch /tmp/mine /root/mine; ls /proc | grep -cx 1", 10) == (0, "left\n1\n")
        assert right.run("ls /tmp/mine /root/mine", 10)[0] != 0
        assert reaches(left, right)
        assert left.run("ssh -i .ssh/id_ed25519 -o StrictHostKeyChecking=no right hostname 2>/dev/null", 10) == (
            0,
            "right\n",
        )
        network.cut(right)
        assert not reaches(left, right)
        network.mend(right)
        assert reaches(left, right)
        processes = [*left.processes(), *right.processes()]
        left.kill()
        network.start(left)
        assert left.run("ls /root/mine && ! ls /tmp/mine 2>/dev/null", 10)[0] == 0, "its disk alone is there again"
        assert reaches(right, left)
        processes += left.processes()
    psutil.wait_procs(processes, timeout=5)
    assert not [process for process in processes if process.is_running()]
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert f"rc{os.getpid()}" not in links


def reaches(one: Host, other: Host) -> bool:
    return one.run(f"timeout 1 {REACH.format(other.address)}", 10)[0] == 0
