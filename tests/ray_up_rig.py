"""A cluster that `ray up` makes out of hosts of a test's own, by the files in deploy/ and the steps of its README."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

from tests.lan import Lan
from tests.service_process import ROOT

CLUSTER: Final = "deploy/cluster.yaml"
APPLICATIONS: Final = "http://127.0.0.1:8265/api/serve/applications/"
NOT_COPIED: Final = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "*.egg-info")
PIP_SETTINGS: Final = "[global]\nno-index = true\ndisable-pip-version-check = true\nno-build-isolation = false\n"
SCRIPTS: Final = ("ray", "serve")
DOCTOR_S: Final = 240
"""How long the doctor waits for hosts, so that a test hears of one that does not come before it gives up itself."""
KEY_NAMES: Final = ("host_key", "id_ed25519")


def make_keys(folder: Path) -> None:
    """One key for all hosts to show, and one for the desk that opens them all."""
    folder.mkdir()
    for name in KEY_NAMES:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)


def furnish(home: Path, keys: Path) -> None:
    """What a machine has before anybody installs Raycomb: keys, and an environment at the place where
    `deploy/cluster.yaml` makes one, which sees the packages of the tests' own. So nothing is downloaded."""
    ssh = home / ".ssh"
    ssh.mkdir()
    for name in KEY_NAMES:
        shutil.copy(keys / name, ssh / name)
    shutil.copy(keys / "id_ed25519.pub", ssh / "authorized_keys")
    pip = home / ".config" / "pip"
    pip.mkdir(parents=True)
    (pip / "pip.conf").write_text(PIP_SETTINGS)
    # Ray makes its workers nice by 15; beside other tests on one machine they would starve.
    (home / ".bashrc").write_text("export RAY_worker_niceness=0\n")
    environment = home / "raycomb-env"
    venv.EnvBuilder(symlinks=True).create(environment)
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path_file = environment / "lib" / version / "site-packages" / "packages_of_the_tests.pth"
    path_file.write_text("".join(f"{place}\n" for place in sorted(places)))
    for script in importlib.metadata.entry_points(group="console_scripts"):
        if script.name in SCRIPTS:
            program = f"import sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
            file = environment / "bin" / script.name
            file.write_text(f"#!/root/raycomb-env/bin/python\n{program}")
            file.chmod(0o755)


class RayUp:
    """Somebody at a desk, with a copy of this repository and a key that opens three hosts."""

    def __init__(self, lan: Lan, keys: Path, model: Path) -> None:
        """All hosts are off. `model` is a path that each of them has."""
        self.desk, self.head, *self.workers = (lan.add(name) for name in ("desk", "head", "one", "two"))
        for host in (self.desk, self.head, *self.workers):
            furnish(host.home, keys)
        self._copy = self.desk.home / "raycomb"
        shutil.copytree(ROOT, self._copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        one, two = self.workers
        self.fill_in(
            CLUSTER,
            {
                "head_ip: 10.0.0.1": f"head_ip: {self.head.address}",
                "worker_ips: [10.0.0.2, 10.0.0.3]": f"worker_ips: [{one.address}, {two.address}]",
                "ssh_user: ubuntu": "ssh_user: root",
                "--wait 600": f"--wait {DOCTOR_S}",
            },
        )
        self.fill_in("deploy/serve.yaml", {"model: smollm2-135m": f"model: {model}"})

    def fill_in(self, name: str, changes: dict[str, str]) -> None:
        """Change a file of the copy, as somebody with an editor would."""
        file = self._copy / name
        text = file.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{old!r} is in {name} {text.count(old)} times"
            text = text.replace(old, new)
        file.write_text(text)

    def try_at_desk(self, line: str, timeout_s: float) -> tuple[int, str]:
        """Run a line of shell in the copy: exit code, and what it printed."""
        settings = "PATH=$HOME/raycomb-env/bin:$PATH RAY_USAGE_STATS_ENABLED=0"
        return self.desk.run(f"cd raycomb && export {settings} && {line}", timeout_s)

    def at_desk(self, line: str, timeout_s: float) -> str:
        """The same for what must succeed."""
        code, printed = self.try_at_desk(line, timeout_s)
        assert code == 0, f"{line}: exit code {code}\n{printed}"
        return printed

    def on_head(self, line: str, timeout_s: float) -> str:
        return self.at_desk(f"ray exec {CLUSTER} {shlex.quote(line)}", timeout_s)

    def autoscaler_log(self) -> str:
        """What Ray wrote on the head while it made the other hosts join."""
        return self.head.run("tail -n 200 /tmp/ray/session_latest/logs/monitor.*", 30)[1]

    def application_status(self) -> str:
        """What Serve says of the application: RUNNING once everything that was asked for is ready."""
        ask = f"import urllib.request as r; print(r.urlopen('{APPLICATIONS}', timeout=10).read().decode())"
        code, printed = self.head.run(f'raycomb-env/bin/python -c "{ask}"', 30)
        assert code == 0, printed
        status: str = json.loads(printed)["applications"]["raycomb"]["status"]
        return status

    def processes(self, title: str) -> dict[str, int]:
        """How many processes with `title` each host has that is on, by its name."""
        return {host.name: len(host.processes(title)) for host in (self.head, *self.workers) if host.is_on}
