"""Which tests run in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.one_service_in_one_process import SHARED_SERVICES, group_of, services_of_files


def test_files_that_ask_for_a_shared_service_are_found() -> None:
    services = services_of_files(Path(__file__).parent)
    assert services["test_cancel_storm.py"] == services["test_openai_client.py"] == "smollm2_service"
    assert services["test_grpc_service.py"] == services["test_serve_app.py"] == "fronted_service"
    assert services["test_failover_storm.py"] == "stormed_service"
    assert set(services.values()) == set(SHARED_SERVICES)
    assert not {"test_cells.py", "test_ray_up.py", Path(__file__).name} & services.keys()


def test_a_service_keeps_to_one_process_and_its_two_fronts_are_two_services() -> None:
    services = {"test_one.py": "fronted_service", "test_two.py": "fronted_service", "test_three.py": "smollm2_service"}
    ids = [
        "tests/test_one.py::test_a[haproxy]",
        "tests/test_two.py::test_b[haproxy-whole]",
        "tests/test_two.py::test_b[python-whole]",
        "test_three.py::test_c[x/y::z]",
        "tests/test_four.py::test_d",
    ]
    assert [group_of(one, services) for one in ids] == [
        "fronted_service haproxy",
        "fronted_service haproxy",
        "fronted_service python",
        "smollm2_service",
        "test_four.py",
    ]


def test_a_service_ends_when_the_next_test_does_not_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from tests.one_service_in_one_process import end_services_that_are_not_wanted\n"
        "@pytest.fixture(scope='session')\n"
        "def smollm2_service():\n"
        "    print('\\nSEEN starts')\n"
        "    yield\n"
        "    print('\\nSEEN ends')\n"
        "@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_runtest_teardown(item, nextitem):\n"
        "    yield\n"
        "    end_services_that_are_not_wanted(item, nextitem)\n"
    )
    (tmp_path / "test_order.py").write_text(
        "def test_one(smollm2_service): print('\\nSEEN one')\n"
        "def test_two(smollm2_service): print('\\nSEEN two')\n"
        "def test_three(): print('\\nSEEN three')\n"
        "def test_four(smollm2_service): print('\\nSEEN four')\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    seen = [line.removeprefix("SEEN ") for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert seen == ["starts", "one", "two", "ends", "three", "starts", "four", "ends"]
