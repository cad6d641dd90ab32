"""TLS on the data plane: both sides show a certificate of the operator's own authority. Free of torch.

The files are those that `raycomb certs` makes. Workers come and go at any address, so all of them answer to one name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import grpc

from planner.errors import InvalidConfiguration

WORKER_NAME: Final = "worker.raycomb.internal"
"""What a worker's certificate is for, whatever its address."""

CHANNEL_OPTIONS: Final = (("grpc.ssl_target_name_override", WORKER_NAME),)

AUTHORITY: Final = "ca.pem"
WORKER: Final = ("worker.pem", "worker-key.pem")
GATEWAY: Final = ("gateway.pem", "gateway-key.pem")


def server_credentials(folder: Path) -> grpc.ServerCredentials:
    """Of a worker, which asks gateways for theirs. Raises `InvalidConfiguration` for a file that is not there."""
    authority, certificate, key = (read_file(folder / name) for name in (AUTHORITY, *WORKER))
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def channel_credentials(folder: Path) -> grpc.ChannelCredentials:
    """Of a gateway. Raises `InvalidConfiguration` for a file that is not there."""
    authority, certificate, key = (read_file(folder / name) for name in (AUTHORITY, *GATEWAY))
    return grpc.ssl_channel_credentials(authority, key, certificate)


def read_file(path: Path) -> bytes:
    """Raises `InvalidConfiguration`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(
            f"{path} cannot be read ({error.strerror}): `raycomb certs` makes it", param="data_plane_tls"
        ) from error
