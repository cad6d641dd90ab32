"""How endpoints get their places in the HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import FastAPI, Request
from starlette.routing import Match

Endpoint = Callable[..., Coroutine[Any, Any, Any]]


def add_routes(app: FastAPI, routes: Iterable[tuple[str, str, Endpoint]]) -> None:
    """`routes`: path, method and endpoint of each. Endpoints make their responses themselves: FastAPI shapes none.

    What can be got can be asked for its head alone, as load balancers do; the server then leaves the body out.
    """
    for path, method, endpoint in routes:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)


def allowed_methods(request: Request) -> list[str]:
    """What the request's path takes. Each route tells of its own method alone."""
    of_path = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in of_path for method in route.methods or ()})
