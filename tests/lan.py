"""Hosts of a test's own on one machine: each has its network, processes, mounts, accounts and sshd (`tests.lan_host`),
and a cable to one switch that can be cut. Needs root.

Nothing has a name that outlives the test: when the process 1 of a host ends, the kernel ends and frees all the rest,
and every process 1 ends with its `unshare`, which ends with this process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from tests.service_process import wait_until

TOOLS: Final = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
SEPARATE: Final = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]
TRIAL: Final = "mount -t tmpfs tmpfs /run && ip link add rc0 type veth peer name rc1 && ip link add rc2 type bridge"
HOST_PROGRAM: Final = Path(__file__).with_name("lan_host.py")
SSH_PORT: Final = 22
START_S: Final = 20.0


def why_no_hosts() -> str | None:
    """What keeps this machine from having such hosts; None: nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts of a test's own need Linux and root"
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"hosts of a test's own need {tool} (package {package})"
    tried = subprocess.run([*SEPARATE, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=START_S, check=False)
    return None if tried.returncode == 0 else f"no rights to make hosts of a test's own: {tried.stderr.strip()}"


class Separate:
    """A command as process 1 of namespaces of its own."""

    def __init__(self, *command: str) -> None:
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
        self._unshare = subprocess.Popen([*ends_with_us, *SEPARATE, *command], stdin=subprocess.DEVNULL)
        wait_until(lambda: len(psutil.Process(self._unshare.pid).children()) == 1, START_S, f"{command} starts")
        (process,) = psutil.Process(self._unshare.pid).children()
        self.pid = process.pid
        """As this machine counts processes."""

    def shell(self, line: str) -> None:
        """Run a line of shell in its network, with the files of this machine."""
        subprocess.run(["nsenter", "--target", str(self.pid), "--net", "sh", "-ec", line], check=True)

    def kill(self) -> None:
        self._unshare.kill()
        self._unshare.wait(START_S)


class Host:
    """One host, on or off. `home` is its disk: it is there again when the host starts again."""

    def __init__(self, name: str, address: str, home: Path) -> None:
        self.name, self.address, self.home = name, address, home
        self._one: Separate | None = None

    @property
    def is_on(self) -> bool:
        return self._one is not None

    @property
    def one(self) -> Separate:
        """Its process 1. The host must be on."""
        assert self._one is not None, f"{self.name} is off"
        return self._one

    def boot(self, keep: list[Path], hosts: str) -> None:
        """Switch it on, without a network. `hosts` is what its /etc/hosts says. Called by its `Lan`."""
        assert self._one is None, f"{self.name} is on"
        told = {"name": self.name, "home": str(self.home), "keep": list(map(str, keep)), "hosts": hosts}
        self._one = Separate(sys.executable, str(HOST_PROGRAM), json.dumps(told))

    def kill(self) -> None:
        """Switch it off without a word to anybody: all its processes end at once."""
        if self._one is not None:
            self._one.kill()
            self._one = None

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its processes whose title holds `title`, oldest first."""
        mine, found = os.readlink(f"/proc/{self.one.pid}/ns/pid"), []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine and title in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.Error, OSError):  # it has ended, or is not for us to see
                continue
        return sorted(found, key=lambda process: process.create_time())

    def run(self, line: str, timeout_s: float) -> tuple[int, str]:
        """Run a line of shell there, as somebody who sits before it: exit code, and what it printed."""
        enter = ["nsenter", "--target", str(self.one.pid), "--all", "--wdns=/root", "bash", "--login", "-c", line]
        environment = {"HOME": "/root", "PATH": os.environ["PATH"], "TERM": "dumb"}
        out, both = subprocess.PIPE, subprocess.STDOUT
        try:
            done = subprocess.run(enter, env=environment, stdout=out, stderr=both, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as cut:
            printed = (cut.output or b"").decode(errors="replace")
            raise TimeoutError(f"{line}: not over after {timeout_s:g} s\n{printed}") from cut
        return done.returncode, done.stdout.decode(errors="replace")


class Lan:
    """Hosts and their switch. This machine is at address .1 of their network."""

    def __init__(self, folder: Path, keep: list[Path]) -> None:
        self._folder, self._keep = folder, keep
        self._network = f"198.18.{os.getpid() % 250}"  # of the addresses that are kept for tests of networks
        self._hosts: list[Host] = []
        self._switch = Separate("sleep", "infinity")
        here, switch_pid = f"rc{os.getpid()}", self._switch.pid
        self._switch.shell("ip link add switch type bridge && ip link set switch up")
        for words in (
            f"link add {here} type veth peer name outside netns {switch_pid}",
            f"address add {self._network}.1/24 dev {here}",
            f"link set {here} up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        self._switch.shell("ip link set outside master switch up")

    def add(self, name: str) -> Host:
        """A host with an empty disk, which is off."""
        host = Host(name, f"{self._network}.{10 + len(self._hosts)}", self._folder / name)
        host.home.mkdir()
        self._hosts.append(host)
        return host

    def start(self, host: Host) -> None:
        """Switch it on with its cable in, and wait until its sshd listens."""
        names = "".join(f"{each.address} {each.name}\n" for each in self._hosts)
        host.boot(self._keep, f"127.0.0.1 localhost\n{names}")
        card = f"02:00:00:00:00:{int(host.address.rpartition('.')[2]):02x}"  # the same each time, as others remember it
        cable = f"{host.name} type veth peer name eth0 address {card} netns {host.one.pid}"
        # The kernel frees the network of a host that was killed in its own time, and the old cable with it.
        self._switch.shell(f"ip link delete {host.name} 2>/dev/null || true")
        self._switch.shell(f"ip link add {cable} && ip link set {host.name} master switch up")
        host.one.shell(f"ip address add {host.address}/24 dev eth0 && ip link set eth0 up")
        wait_until(lambda: _listens(host.address, SSH_PORT), START_S, f"{host.name} has an sshd")

    def cut(self, host: Host) -> None:
        """Pull its cable out of the switch."""
        self._switch.shell(f"ip link set {host.name} down")

    def mend(self, host: Host) -> None:
        """Put the cable in again."""
        self._switch.shell(f"ip link set {host.name} up")

    def close(self) -> None:
        for host in self._hosts:
            host.kill()
        self._switch.kill()


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def lan(folder: Path, keep: list[Path]) -> Iterator[Lan]:
    """`keep` are folders and files of this machine that every host sees, read-only."""
    made = Lan(folder, keep)
    try:
        yield made
    finally:
        made.close()
