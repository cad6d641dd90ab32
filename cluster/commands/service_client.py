"""One request to a service over HTTP, for commands that look at one. Blocks. Not for measuring, and not for streams."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPResponse
from typing import Any, Final

_DIRECT: Final = urllib.request.ProxyHandler({})
"""A proxy that this machine uses for the world outside does not reach the machine itself."""


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that opens a service with keys."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def opened(
    url: str, *, patience_s: float, api_key: str | None = None, body: dict[str, Any] | None = None
) -> HTTPResponse:
    """The answer, for `with`. A `body` is posted as JSON, else it is a GET. Raises `OSError`, of which
    `urllib.error.HTTPError` is an answer that is none of success, and `http.client.HTTPException`."""
    data = None if body is None else json.dumps(body).encode()
    headers = bearer(api_key) if body is None else bearer(api_key) | {"content-type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    answer: HTTPResponse = urllib.request.build_opener(_DIRECT).open(request, timeout=patience_s)
    return answer
