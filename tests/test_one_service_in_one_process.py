"""Which tests run in one process: the table names all files that share a service, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.one_service_in_one_process import FILES_THAT_SHARE, group_of


@pytest.mark.parametrize("service", FILES_THAT_SHARE)
def test_every_file_that_asks_for_a_shared_service_is_known(service: str) -> None:
    files = Path(__file__).parent.glob("test_*.py")
    asking = {file.name for file in files if re.search(rf"\b{service}: ", file.read_text())}
    assert asking == set(FILES_THAT_SHARE[service])


def test_a_service_keeps_to_one_process_and_its_two_fronts_are_two_services() -> None:
    ids = [
        "tests/test_grpc_service.py::test_a[haproxy]",
        "tests/test_serve_app.py::test_b[haproxy-whole]",
        "tests/test_serve_app.py::test_b[python-whole]",
        "tests/test_ray_up.py::test_c",
        "test_service.py::test_d",
        "test_smoke.py::test_e[x/y::z]",
    ]
    assert [group_of(one) for one in ids] == [
        "fronted_service haproxy",
        "fronted_service haproxy",
        "fronted_service python",
        "test_ray_up.py",
        "smollm2_service",
        "smollm2_service",
    ]
