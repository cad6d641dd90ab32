"""The one question of `raycomb serve --ask`, and how it learns that the service is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cluster.commands.ask import is_ready
from tests.ports import own_ports


class Handler(BaseHTTPRequestHandler):
    """Ready from the second question on."""

    num_asked = 0

    def do_GET(self) -> None:
        self.server.num_asked += 1  # type: ignore[attr-defined]
        self.send_response(200 if self.server.num_asked > 1 else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.num_asked = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_is_ready_when_it_says_so(url: str) -> None:
    assert [is_ready(url), is_ready(url)] == [False, True]


def test_nobody_there_is_not_ready() -> None:
    assert not is_ready(f"http://127.0.0.1:{own_ports(1)[0]}")


def test_a_proxy_of_this_machine_is_not_asked_for_its_own_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{own_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert [is_ready(url), is_ready(url)] == [False, True]
