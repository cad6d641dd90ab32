"""Whether a Ray cluster can be at the address that RAY_ADDRESS says, found out without Ray, which tries for minutes."""

from __future__ import annotations

import socket
from typing import Final

from planner.errors import InvalidConfiguration, SetupError

AUTO: Final = "auto"
"""The cluster that runs on this machine, which Ray looks up by itself, and at once."""

CONNECT_S: Final = 5.0


def check_cluster_address(address: str) -> None:
    """Raises `InvalidConfiguration` for what is no address of a cluster, `SetupError` where nobody listens."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal() and int(port[:6]) <= 65_535):
        raise InvalidConfiguration(
            f"RAY_ADDRESS is {address!r}: say auto on a machine of the cluster, or host:port of its head",
            param="RAY_ADDRESS",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise no_answer(address, error) from error


def no_answer(address: str, error: Exception) -> SetupError:
    """What to say where no cluster answers at `address`."""
    return SetupError(f"no Ray cluster answers at RAY_ADDRESS={address}: {getattr(error, 'strerror', None) or error}")
