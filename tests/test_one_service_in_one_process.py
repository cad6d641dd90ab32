"""Which tests run in one process."""

from __future__ import annotations

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
