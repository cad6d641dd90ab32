"""API keys: hashed, several, each with its tenant and limits; over HTTP and gRPC the same."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cluster.access.key_ring import KeyRing, KeyUse
from cluster.api_settings import ApiSettings, KeySettings
from cluster.cli import main
from cluster.commands.serve import read_keys
from cluster.config import service_config
from cluster.headers import TENANT
from planner.errors import InvalidConfiguration, RateLimited, Unauthenticated
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import failure, grpc_desk, text_of, trailer
from tests.http_desk import CHAT, MODEL, PROMPT, desk, refusal, says, until


def hashed(key: str, **settings: Any) -> KeySettings:
    return KeySettings(sha256=hashlib.sha256(key.encode()).hexdigest(), **settings)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def use_of(key: KeySettings, clock: Clock) -> KeyUse:
    use = KeyRing(ApiSettings(keys=(key,)), clock).find("Bearer k")
    assert use is not None
    return use


def test_every_key_of_both_kinds_opens_and_nothing_else_does() -> None:
    ring = KeyRing(ApiSettings(api_keys=("plain",), keys=(hashed("first"), hashed("second"))))
    tenants = {ring.find(f"Bearer {key}").tenant for key in ("plain", "first", "second")}  # type: ignore[union-attr]
    assert len(tenants) == 3
    digest = hashlib.sha256(b"first").hexdigest()
    for wrong in ("", "Bearer", "Bearer ", "Basic plain", "plain", "Bearer Plain", f"Bearer {digest}", "Bearer é"):
        with pytest.raises(Unauthenticated):
            ring.find(wrong)


def test_without_keys_all_is_open() -> None:
    assert KeyRing(ApiSettings()).find("") is None


def test_a_service_without_an_admins_key_says_how_it_gets_one() -> None:
    with pytest.raises(Unauthenticated, match="this service was started without one"):
        KeyRing(ApiSettings()).check_admin("Bearer any")


def test_a_key_stands_for_a_tenant_and_is_not_told() -> None:
    ring = KeyRing(ApiSettings(api_keys=("secret", "other")))
    first, again, other = ring.find("Bearer secret"), ring.find("bearer  secret "), ring.find("Bearer other")
    assert first is again is not other
    assert "secret" not in repr(first)
    assert repr(hashlib.sha256(b"secret").digest()) not in repr(first)


def test_a_key_has_so_many_requests_a_minute_and_is_told_when_to_come_again() -> None:
    clock = Clock()
    use = use_of(hashed("k", requests_per_minute=30), clock)
    for _ in range(30):
        with use.admitted():
            pass
    with pytest.raises(RateLimited, match="30 requests a minute") as told, use.admitted():
        pass
    assert told.value.retry_after_s == pytest.approx(2.0)
    clock.now += 2.0
    with use.admitted():
        pass
    clock.now += 3600.0
    assert use.num_open == 0
    for _ in range(30):  # a quiet hour saves no more than a minute's worth
        with use.admitted():
            pass
    with pytest.raises(RateLimited), use.admitted():
        pass


def test_a_key_has_so_many_requests_open_whatever_ends_them() -> None:
    use = use_of(hashed("k", max_open_requests=1), Clock())
    with use.admitted(), pytest.raises(RateLimited, match="1 requests open"), use.admitted():
        pass
    with pytest.raises(ValueError, match="inside"), use.admitted():
        raise ValueError("inside")
    with use.admitted():
        assert use.num_open == 1


async def test_http_clients_over_their_limit_hear_429_and_others_nothing() -> None:
    keys = (hashed("k", max_open_requests=1), hashed("free"))
    async with desk(says("hi there you"), keys=keys) as d:
        d.fleet.gate.clear()
        first = asyncio.create_task(d.http.post("/v1/completions", json=PROMPT, headers=bearer("k")))
        await until(lambda: d.fleet.num_running == 1)
        second = await d.http.post("/v1/chat/completions", json=CHAT, headers=bearer("k"))
        assert refusal(second, 429)["code"] == "rate_limited"
        assert second.headers["retry-after"] == "1"
        assert (await d.http.get("/v1/models", headers=bearer("k"))).status_code == 200  # it asks for no tokens
        other = asyncio.create_task(d.http.post("/v1/completions", json=PROMPT, headers=bearer("free")))
        await until(lambda: d.fleet.num_running == 2)
        d.fleet.gate.set()
        assert [(await one).status_code for one in (first, other)] == [200, 200]
        assert (await d.http.post("/v1/completions", json=PROMPT, headers=bearer("k"))).status_code == 200
        page = (await d.http.get("/metrics")).text
    assert 'raycomb_requests_refused_total{code="rate_limited"' in page


async def test_a_key_with_a_tenant_speaks_for_it_alone() -> None:
    async with desk(keys=(hashed("fixed", tenant="acme"), hashed("loose"))) as d:
        for key in ("fixed", "loose"):
            await d.http.post("/v1/completions", json=PROMPT, headers=bearer(key) | {TENANT: "other"})
        assert [request.tenant for request in d.fleet.requests] == ["acme", "other"]


async def test_grpc_calls_keep_to_the_same_limits() -> None:
    fleet = FakeFleet(MODEL, says("hi"))
    async with grpc_desk(fleet=fleet, keys=(hashed("k", requests_per_minute=1),)) as client:
        metadata = (("authorization", "Bearer k"),)
        assert text_of(await client.generate(metadata)) == "hi"
        told = await failure(client, metadata)
    assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailer(told, "error-code") == "rate_limited"
    assert 1 < int(trailer(told, "retry-after") or 0) <= 60


def test_the_command_makes_a_key_that_its_own_entry_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--tenant", "acme", "--requests-per-minute", "60"]) == 0
    told = capsys.readouterr().out
    key = told.splitlines()[0].rpartition(" ")[2]
    file = tmp_path / "keys.yaml"
    file.write_text(told)
    entries = read_keys(file)
    settings = service_config({"engine": {"model": "m"}, "http": {"keys": entries}}).http
    use = KeyRing(settings).find(f"Bearer {key}")
    assert use is not None
    assert (use.tenant, use.requests_per_minute, use.max_open_requests) == ("acme", 60, None)
    assert key not in yaml.safe_dump(entries)


@pytest.mark.parametrize("text", ["", "{}", "[", "- 1\n- }", "key: x"])
def test_a_file_that_is_no_list_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfiguration) as told:
        read_keys(file)
    assert told.value.param == "api_keys_file"


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ({"sha256": "00"}, "http.keys.0.sha256"),
        ({"sha256": "0" * 64, "requests_per_minute": 0}, "http.keys.0.requests_per_minute"),
        ({"sha256": "0" * 64, "tenant": "two words"}, "http.keys.0.tenant"),
        ({"sha256": "0" * 64, "key": "plain"}, "http.keys.0.key"),
    ],
)
def test_a_key_that_is_none_is_refused_by_name(entry: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidConfiguration) as told:
        service_config({"engine": {"model": "m"}, "http": {"keys": [entry]}})
    assert told.value.param == param


def test_a_question_at_the_start_needs_a_key_that_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- sha256: {'0' * 64}\n")
    assert main(["serve", str(tmp_path), "--api-keys-file", str(file), "--ask", "Hello?"]) == 2
    assert "--ask needs an --api-key" in capsys.readouterr().err
