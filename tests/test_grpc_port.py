"""Where `raycomb serve` listens for gRPC."""

from __future__ import annotations

import socket

import pytest

from cluster.cli import serve_parser
from cluster.serving.front import DEFAULT_GRPC_PORT, Front, choose_grpc_port
from planner.errors import InvalidConfiguration
from tests.ports import own_ports


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("front", [Front.HAPROXY, Front.PYTHON])
def test_zero_is_no_grpc_and_a_free_port_is_taken_as_asked(front: Front) -> None:
    (port,) = own_ports(1)
    assert choose_grpc_port(0, front, "0.0.0.0") is None
    assert choose_grpc_port(port, front, "127.0.0.1") == port


@pytest.mark.parametrize("front", [Front.HAPROXY, Front.PYTHON])
def test_a_taken_port_that_was_asked_for_is_refused(front: Front, taken_port: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f":{taken_port}: .*choose another --grpc-port"):
        choose_grpc_port(taken_port, front, "127.0.0.1")


def test_the_default_is_taken_only_if_nothing_has_it() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_free(DEFAULT_GRPC_PORT):
            assert choose_grpc_port(None, Front.HAPROXY, "127.0.0.1") == DEFAULT_GRPC_PORT
            other.bind(("127.0.0.1", DEFAULT_GRPC_PORT))
            other.listen()
        assert choose_grpc_port(None, Front.HAPROXY, "127.0.0.1") is None


def test_no_address_is_opened_that_was_not_asked_for() -> None:
    """Serve's proxy in Python listens for gRPC on every address, whatever the host is."""
    assert choose_grpc_port(None, Front.PYTHON, "127.0.0.1") is None


@pytest.mark.parametrize(("given", "port"), [([], None), (["--grpc-port", "0"], 0), (["--grpc-port", "9001"], 9001)])
def test_the_flag_takes_a_port_or_zero(given: list[str], port: int | None) -> None:
    assert serve_parser().parse_args(["m", *given]).grpc_port == port
