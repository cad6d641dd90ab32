"""The one request of `raycomb doctor`, against a real service and against nobody."""

from __future__ import annotations

import pytest

from cluster.commands.smoke import why_no_token
from tests.ports import own_ports
from tests.service_process import ServiceProcess


def test_nobody_gives_no_answer() -> None:
    (port,) = own_ports(1)
    fault = why_no_token(f"http://127.0.0.1:{port}")
    assert fault is not None
    assert fault.startswith("it gives no answer: ")


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.timeout(400)
def test_a_real_service_gives_a_token_to_who_has_the_key(smollm2_service: ServiceProcess, api_key: str) -> None:
    assert why_no_token(smollm2_service.url, api_key) is None
    fault = why_no_token(smollm2_service.url)
    assert fault is not None
    assert fault.startswith("it answers 401: ")
    assert api_key not in fault
