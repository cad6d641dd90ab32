"""The application itself: bodies, keys, CORS, request ids, probes, models, tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.models import single
from cluster.version import VERSION
from cluster.web.api import create_app
from planner.request import Request
from tests.fake_fleet import FakeFleet
from tests.http_desk import (
    CHAT,
    MODEL,
    PROMPT,
    TEXT,
    VOCAB,
    desk,
    refusal,
    says,
)
from tests.listening import listening
from tests.tiny_text import tiny_text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"prompt":"caf\xe9("}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":-Infinity}',
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_a_broken_body_is_the_clients_error(body: bytes) -> None:
    async with desk() as d:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refusal(await d.http.post(path, content=body, headers={"content-type": "application/json"}))


async def test_a_nul_character_is_text_and_the_content_type_does_not_matter() -> None:
    async with desk() as d:
        answer = await d.http.post("/v1/completions", content=b'{"prompt":"a\\u0000b"}')
    assert answer.status_code == 200


async def test_a_body_over_the_limit_is_413_also_when_its_length_is_not_told() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 300

    async with desk(max_body_bytes=1000) as d:
        told = await d.http.post("/v1/completions", content=b" " * 1001)
        untold = await d.http.post("/v1/completions", content=pieces())
    assert refusal(told, 413)["code"] == refusal(untold, 413)["code"] == "body_too_large"


async def test_a_body_that_takes_too_long_is_408_and_the_end_of_its_connection() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with desk(body_timeout_s=0.1) as d, listening(d.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: service\r\ncontent-length: 9\r\n\r\n{")
        answer = (await asyncio.wait_for(reader.read(), 5)).decode()  # to the end of the connection
        writer.close()
        assert answer.startswith("HTTP/1.1 408")
        assert '"code": "body_too_slow"' in answer
        assert "1 bytes of the body came within 0.1 s" in answer
        session = await d.http.post("/v1/sessions", content=pieces())
        assert refusal(session, 408)["code"] == "body_too_slow"


async def test_a_key_opens_everything_but_the_probes() -> None:
    async with desk(api_keys=("one", "two")) as d:
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "Basic one"},
            {"authorization": "one"},
        ):
            answer = await d.http.post("/v1/completions", json=PROMPT, headers=headers)
            assert refusal(answer, 401)["code"] == "unauthenticated"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            answer = await d.http.post("/v1/completions", json=PROMPT, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        for path in ("/health", "/ready", "/version"):
            assert (await d.http.get(path)).status_code == 200
        for path in ("//v1/completions", "/V1/completions", "/v1//completions", "/v1/completions?x=1", "/health/"):
            assert (await d.http.post(path, json=PROMPT)).status_code == 401


async def test_a_preflight_needs_no_key_and_every_answer_may_be_read() -> None:
    origin = {"origin": "http://example.test"}
    async with desk(api_keys=("one",)) as d:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        preflight = await d.http.options("/v1/chat/completions", headers=origin | asks)
        refused = await d.http.post("/v1/completions", json=PROMPT, headers=origin)
        key = {"authorization": "Bearer one"}
        good = await d.http.post("/v1/completions", json=PROMPT, headers=origin | key)
        bad = await d.http.post("/v1/completions", json={**PROMPT, "n": 0}, headers=origin | key)
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert [a.status_code for a in (refused, good, bad)] == [401, 200, 400]
    for answer in (preflight, refused, good, bad):
        assert answer.headers["access-control-allow-origin"] in ("*", "http://example.test")


async def test_a_request_id_is_echoed_or_made() -> None:
    async with desk() as d:
        given = await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine-1"})
        made = [await d.http.post("/v1/completions", json=PROMPT) for _ in range(2)]
        odd = await d.http.get("/v1/models", headers={"x-request-id": "x" * 300})
        nowhere = await d.http.get("/nowhere", headers={"x-request-id": "mine-2"})
    assert given.headers["x-request-id"] == "mine-1"
    assert nowhere.headers["x-request-id"] == "mine-2"
    assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert len(odd.headers["x-request-id"]) == 32


async def test_a_server_around_the_application_may_tell_the_request_id_alone() -> None:
    app = create_app(single(Service(FakeFleet(MODEL, says("x")), TEXT, ApiSettings())), tells_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        for path in ("/v1/models", "/nowhere"):
            assert "x-request-id" not in (await http.get(path)).headers


async def test_unknown_paths_and_methods_answer_in_json() -> None:
    async with desk() as d:
        refusal(await d.http.get("/v1/nothing-here"), 404)
        wrong = await d.http.get("/v1/chat/completions")
        refusal(await d.http.post("/v1/chat/completions/", json=CHAT), 404)
        refusal(await d.http.get("//v1/models"), 404)
    refusal(wrong, 405)
    assert wrong.headers["allow"] == "POST"


async def test_models_are_listed_and_found() -> None:
    async with desk(served_model_names=("a/b", "c")) as d:
        listed = (await d.http.get("/v1/models")).json()
        one = (await d.http.get("/v1/models/a/b")).json()
        unknown = refusal(await d.http.get("/v1/models/nope"), 404)
        other = refusal(await d.post("/v1/completions", **PROMPT, model="tiny"), 404)
        second = (await d.post("/v1/completions", **PROMPT, model="c")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a/b", "c"]
    assert one == listed["data"][0]
    assert one["max_model_len"] == 64
    assert unknown["code"] == other["code"] == "model_not_found"
    assert "nope" in unknown["message"]
    assert second["model"] == "c"


async def test_tokenize_and_detokenize_undo_each_other() -> None:
    text = "hello wörld 🦙<|stop|>"
    async with desk() as d:
        tokens = (await d.post("/tokenize", prompt=text, return_token_strs=True)).json()
        back = (await d.post("/detokenize", tokens=tokens["tokens"])).json()
        chat = (await d.post("/tokenize", **CHAT)).json()
        empty = (await d.post("/detokenize", model="tiny", tokens=[])).json()
        for path, body in (
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {}),
            ("/detokenize", {"tokens": [VOCAB]}),
            ("/detokenize", {"tokens": "x"}),
        ):
            refusal(await d.post(path, **body))
    assert back == {"prompt": text}
    assert empty == {"prompt": ""}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 64
    assert TEXT.decode(chat["tokens"]).endswith("<|start|>assistant:")


async def test_probes_tell_starting_ready_and_draining_apart() -> None:
    async with desk(model=None) as d:
        d.fleet.ready = False
        refusal(await d.http.get("/health"), 503)
        refusal(await d.http.get("/ready"), 503)
        refusal(await d.post("/v1/completions", **PROMPT), 503)
        d.fleet.model, d.fleet.ready = MODEL, True
        assert (await d.http.get("/health")).status_code == 200
        assert (await d.http.get("/ready")).status_code == 200
        d.fleet.ready = False
        assert (await d.http.get("/health")).status_code == 200
        refusal(await d.http.get("/ready"), 503)
        assert (await d.http.get("/version")).json() == {"version": VERSION}


async def test_heads_are_answered_where_bodies_are() -> None:
    async with desk() as d:
        for path in ("/health", "/ready", "/v1/models"):
            assert (await d.http.head(path)).status_code == 200, path
        assert (await d.http.head("/v1/completions")).status_code == 405
        assert refusal(await d.http.get("/v1/completions"), 405)["message"] == "/v1/completions takes POST, not GET"
        assert refusal(await d.http.delete("/health"), 405)["message"] == "/health takes GET or HEAD, not DELETE"


async def test_a_wrong_method_is_told_of_every_right_one() -> None:
    async with desk() as d:
        patched = await d.http.patch("/v1/sessions")
        assert refusal(patched, 405)["message"] == "/v1/sessions takes GET or HEAD or POST, not PATCH"
        assert patched.headers["allow"] == "GET, HEAD, POST"
        assert (await d.http.put("/v1/files/x")).headers["allow"] == "DELETE, GET, HEAD"


async def test_a_model_without_a_template_does_not_chat() -> None:
    async with desk(text=tiny_text(template=None)) as d:
        assert "template" in refusal(await d.post("/v1/chat/completions", **CHAT))["message"]


async def test_the_templates_own_words_reach_the_client() -> None:
    text = tiny_text("{{ raise_exception('roles must alternate') }}")
    async with desk(text=text) as d:
        error = refusal(await d.post("/v1/chat/completions", **CHAT))
    assert "roles must alternate" in error["message"]
    assert error["param"] == "messages"


async def test_long_prompts_wait_in_a_bounded_line() -> None:
    async with desk(inline_size=0, text_threads=1, max_long_texts=1) as d:
        answers = await asyncio.gather(*(d.post("/v1/completions", **PROMPT) for _ in range(8)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}


async def test_an_unforeseen_error_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request, index: int) -> list[int]:
        raise ZeroDivisionError("inner secret")

    async with desk(script) as d:
        error = refusal(await d.http.post("/v1/completions", json=PROMPT, headers={"origin": "http://x"}), 500)
    assert "secret" not in error["message"]
    assert "inner secret" in caplog.text


async def test_below_a_prefix_the_same_paths_are_open() -> None:
    async with desk(api_keys=("one",)) as d:
        transport = httpx.ASGITransport(app=d.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            assert (await http.get("/llm/health")).status_code == 200
            assert (await http.post("/llm/v1/completions", json=PROMPT)).status_code == 401
            key = {"authorization": "Bearer one"}
            assert (await http.post("/llm/v1/completions", json=PROMPT, headers=key)).status_code == 200
