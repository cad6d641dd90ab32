"""How endpoints get their places in the HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import FastAPI

Endpoint = Callable[..., Coroutine[Any, Any, Any]]


def add_routes(app: FastAPI, routes: Iterable[tuple[str, str, Endpoint]]) -> None:
    """`routes`: path, method and endpoint of each. Endpoints make their responses themselves: FastAPI shapes none."""
    for path, method, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
