"""A look at the server before it is measured: whether it is there, and what it serves. Not for measuring."""

from __future__ import annotations

import json
import socket
import urllib.error
from typing import Final

from cluster.bench.sse_client import Target
from cluster.commands.service_client import opened
from planner.errors import InvalidConfiguration, Unavailable

ANSWER_S: Final = 10.0


def check_reachable(base_url: str) -> None:
    """Raises `Unavailable` where nothing takes a connection: a load would fail request by request."""
    target = Target.parse(base_url)
    try:
        socket.create_connection((target.host, target.port), ANSWER_S).close()
    except OSError as error:
        raise Unavailable(f"{base_url} does not answer: {error.strerror or error}") from error


def first_model(base_url: str, api_key: str | None) -> str:
    """The name that the server's `/v1/models` lists first. Raises `Unavailable`, or `InvalidConfiguration` where the
    server does not tell."""
    try:
        with opened(f"{base_url}/v1/models", patience_s=ANSWER_S, api_key=api_key) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "give --api-key" if error.code == 401 else "give --model"
        raise InvalidConfiguration(f"{base_url}/v1/models answered {error.code}: {hint}", param="model") from error
    except OSError as error:
        raise Unavailable(f"{base_url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidConfiguration(f"{base_url}/v1/models lists no model: give --model", param="model") from error
