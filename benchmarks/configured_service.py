"""A program: `raycomb serve` with settings that have no flag, such as the secret of the data plane.

Run as `python -m benchmarks.configured_service SETTINGS --port PORT --grpc-port PORT`, where SETTINGS is a JSON file of
`cluster.config.ServiceConfig`. Says "ready at" like the command and ends by the same signals.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config import service_config
from cluster.serving.front import Front, choose_front, front_environment
from cluster.serving.haproxy_script import LOOPBACK
from tests.service_process import ServiceProcess, running_service

READY_WITHIN_S = 240.0
GONE_WITHIN_S = 90.0


@contextmanager
def configured_service(
    settings: Mapping[str, Any], front: Front = Front.AUTO, environment: Mapping[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """The service with these settings, ready; gone when the block ends. Its processes can be found and killed. They
    have `environment` beside this process'."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        file.write_text(json.dumps(settings))
        program = ("benchmarks.configured_service", str(file))
        with running_service("--front", front, program=program, environment=environment) as service:
            service.wait_for_line("ready at", READY_WITHIN_S)
            yield service
            service.end(GONE_WITHIN_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--front", type=Front, default=Front.AUTO)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    args = parser.parse_args()
    config = service_config(json.loads(args.settings.read_text()))
    front = choose_front(args.front)
    with front_environment(front, LOOPBACK) as variables:
        os.environ.update(variables)
        from cluster.commands.local_service import LocalService  # imports Ray, which reads the environment at import

        ports = {"port": args.port, "grpc_port": args.grpc_port}
        return LocalService(config, host=LOOPBACK, **ports, behind_haproxy=front is Front.HAPROXY).run(None)


if __name__ == "__main__":
    raise SystemExit(main())
