"""What the doctor says of keys, certificates, a collector and metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.access.certificates import make_certificates
from cluster.cli import main
from cluster.commands.doctor_settings import keys_finding, metrics_finding, tls_finding, traces_finding
from tests.http_desk import desk
from tests.listening import listening
from tests.otlp_collector import grpc_collector, http_collector
from tests.ports import own_ports

HASH = "0" * 64


def test_keys_are_counted_and_those_that_are_none_explained(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- sha256: '{HASH}'\n- sha256: '{'1' * 64}'\n  requests_per_minute: 5\n")
    file.chmod(0o600)
    assert str(keys_finding(file)) == "ok   keys: 2 hashes, 1 with limits (mode 0600)"
    for text, word in ((f"- sha256: '{HASH}'\n" * 2, "twice"), ("- sha256: short\n", "sha256"), ("{}", "at least one")):
        file.write_text(text)
        assert word in str(keys_finding(file))
        assert keys_finding(file).failed
    assert keys_finding(tmp_path / "none.yaml").failed


def test_certificates_are_judged_by_how_long_they_are_good(tmp_path: Path) -> None:
    folder, now = tmp_path / "certs", datetime.now(UTC)
    make_certificates(folder, [], days=30)
    assert not tls_finding(folder, now).failed
    assert tls_finding(folder, now + timedelta(days=20)).failed
    (folder / "worker.pem").write_text("nonsense")
    assert "no certificate" in str(tls_finding(folder, now))
    (folder / "worker.pem").unlink()
    assert "cannot be read" in str(tls_finding(folder, now))


def test_a_collector_is_asked_whether_it_takes_spans() -> None:
    with grpc_collector() as grpc_one, http_collector() as http_one:
        assert not traces_finding(grpc_one.url, "grpc").failed
        assert not traces_finding(http_one.url, "http/protobuf").failed
    (port,) = own_ports(1)
    assert traces_finding(f"http://127.0.0.1:{port}", "http/protobuf").failed


async def test_metrics_are_those_of_this_version() -> None:
    async with desk() as d, listening(d.app) as url:
        found = await asyncio.to_thread(metrics_finding, url.rstrip("/"))
        assert not found.failed, str(found)
        elsewhere = await asyncio.to_thread(metrics_finding, f"{url}v1")
        assert elsewhere.failed


def test_the_command_looks_at_what_it_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = [str(port) for port in own_ports(2)]
    told = ["--port", ports[0], "--grpc-port", ports[1], "--api-keys-file", str(tmp_path / "none.yaml")]
    assert main(["doctor", *told]) == 1
    assert "FAIL keys:" in capsys.readouterr().out
    assert main(["doctor", "--otlp-endpoint", "nowhere"]) == 2
