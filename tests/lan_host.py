"""A program: process 1 of a host that a test makes (`tests.lan`), in namespaces of its own which `unshare` has made.

It gives the host a disk (`home`, which outlives it), memory file systems, accounts and an sshd, and then reaps what
ends. Of the machine's files under the covered folders only `keep` stays to be seen, read-only. Standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

COVERED = ("/tmp", "/dev/shm", "/root")
STAGE = Path("/run/stage")
PASSWD = "root:x:0:0:root:/root:/bin/bash\nsshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n"
SHADOW = "root:*:20000:0:99999:7:::\nsshd:*:20000:0:99999:7:::\n"
SSHD_OPTIONS = {
    "AddressFamily": "inet",
    "UsePAM": "no",
    "StrictModes": "no",
    "PidFile": "none",
    "HostKey": "/root/.ssh/host_key",
    "MaxStartups": "100",
    "PrintMotd": "no",
}


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def lay_out_files(home: str, keep: list[str], hosts: str) -> None:
    """Mounts that only this host sees. What is kept waits in /run while the folders that hide it are covered."""
    call("mount", "--make-rprivate", "/")
    call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    staged: dict[str, Path] = {}
    for source in (home, *keep):
        staged[source] = STAGE / str(len(staged))
        if Path(source).is_dir():
            staged[source].mkdir(parents=True)
        else:
            staged[source].touch()
        call("mount", "--bind", source, str(staged[source]))
    for folder in COVERED:
        call("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
    call("mount", "--move", str(staged.pop(home)), "/root")
    for source, place in staged.items():
        if place.is_dir():
            Path(source).mkdir(parents=True, exist_ok=True)
        else:
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).touch()
        call("mount", "--move", str(place), source)
        call("mount", "-o", "remount,bind,ro", source)
    for path, text in (("/etc/passwd", PASSWD), ("/etc/shadow", SHADOW), ("/etc/hosts", hosts)):
        own = Path("/run") / Path(path).name
        own.write_text(text)
        call("mount", "--bind", str(own), path)


def main() -> None:
    told = json.loads(sys.argv[1])
    lay_out_files(told["home"], told["keep"], told["hosts"])
    socket.sethostname(told["name"])
    call("ip", "link", "set", "lo", "up")
    Path("/run/sshd").mkdir()
    options = [word for name, value in SSHD_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    os.chdir("/root")
    environment = {"PATH": os.environ["PATH"], "HOME": "/root"}
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *options]
    with Path("/root/sshd.log").open("a") as log:
        sshd = subprocess.Popen(command, env=environment, stderr=log)
    while os.wait()[0] != sshd.pid:
        pass


if __name__ == "__main__":
    main()
