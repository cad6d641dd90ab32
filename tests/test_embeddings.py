"""POST /v1/embeddings: what is accepted, how vectors are told, what is refused, and what ends early."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.errors import ForwardFailed, QueueFull
from planner.request import Pooling
from tests.fake_fleet import fake_vector
from tests.http_desk import MODEL, TEXT, Desk, RawClient, desk, refusal, until

PATH = "/v1/embeddings"


def of_length_one(vector: tuple[float, ...]) -> list[float]:
    array = np.array(vector, np.float32)
    return list((array / np.linalg.norm(array)).tolist())


async def embedded(d: Desk, given: Any, **body: Any) -> dict[str, Any]:
    answer = await d.post(PATH, input=given, **body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_a_text_becomes_a_vector_of_length_one() -> None:
    async with desk() as d:
        told = await embedded(d, "hello world")
        (request,) = d.fleet.requests
        assert request.prompt.tolist() == TEXT.encode("hello world")
        assert (request.pooling, request.max_tokens) == (Pooling.LAST, 0)
        assert told["object"] == "list"
        assert told["model"] == "tiny"
        (one,) = told["data"]
        assert (one["object"], one["index"]) == ("embedding", 0)
        assert one["embedding"] == pytest.approx(of_length_one(fake_vector(request)))
        assert told["usage"] == {"prompt_tokens": len(request.prompt), "total_tokens": len(request.prompt)}


async def test_texts_and_ids_are_answered_in_order_however_many() -> None:
    async with desk() as d:
        texts = [f"text {i}" for i in range(200)]
        told = await embedded(d, texts, normalize=False, pooling="mean")
        by_prompt = {TEXT.decode(r.prompt.tolist()): list(fake_vector(r)) for r in d.fleet.requests}
        assert [one["index"] for one in told["data"]] == list(range(200))
        np.testing.assert_allclose(
            [one["embedding"] for one in told["data"]], [by_prompt[text] for text in texts], rtol=1e-6
        )
        ids = await embedded(d, [[5, 6], [7]], normalize=False)
        assert [one["embedding"][:2] for one in ids["data"]] == [[6, 2], [7, 1]]
        assert len((await embedded(d, [5, 6, 7]))["data"]) == 1


async def test_base64_is_the_same_numbers_as_float32() -> None:
    async with desk() as d:
        numbers = (await embedded(d, "hello"))["data"][0]["embedding"]
        coded = (await embedded(d, "hello", encoding_format="base64"))["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(numbers)


async def test_fewer_dimensions_are_the_first_ones_of_length_one() -> None:
    async with desk() as d:
        told = await embedded(d, "hello", dimensions=2)
        assert told["data"][0]["embedding"] == pytest.approx(of_length_one(fake_vector(d.fleet.requests[0])[:2]))
        error = refusal(await d.post(PATH, input="hello", dimensions=5))
        assert error["param"] == "dimensions"
        assert "4" in error["message"]


async def test_the_operator_says_how_vectors_are_made_and_a_client_may_differ() -> None:
    async with desk(embedding_pooling="mean") as d:
        await embedded(d, "hello")
        await embedded(d, "hello", pooling="last")
        assert [request.pooling for request in d.fleet.requests] == [Pooling.MEAN, Pooling.LAST]


async def test_a_long_text_is_refused_or_cut_from_the_left() -> None:
    async with desk() as d:
        ids = list(range(3, 103))
        error = refusal(await d.post(PATH, input=ids))
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        refusal(await d.post(PATH, input="hello " * 500))
        assert not d.fleet.requests
        await embedded(d, ids, truncate_prompt_tokens=-1)
        await embedded(d, ids, truncate_prompt_tokens=5)
        assert [request.prompt.tolist() for request in d.fleet.requests] == [ids[-64:], ids[-5:]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [100_000]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    async with desk() as d:
        told = refusal(await d.post(PATH, **body))
        assert told["param"] == param
        assert param in told["message"]
        assert not d.fleet.requests


async def test_a_program_without_vectors_and_an_unknown_model_are_told_so() -> None:
    async with desk(model=replace(MODEL, vector_size=None)) as d:
        assert refusal(await d.post(PATH, input="hello"))["param"] == "model"
    async with desk() as d:
        assert refusal(await d.post(PATH, input="hello", model="gpt-4"), 404)["code"] == "model_not_found"


async def test_a_failure_and_a_refusal_have_their_own_status() -> None:
    async with desk() as d:
        d.fleet.fail_after = (0, ForwardFailed("broken"))
        assert refusal(await d.post(PATH, input=["a", "b"]), 500)["code"] == "forward_failed"
        d.fleet.fail_after, d.fleet.refusal_at_submit = None, QueueFull("full", retry_after_s=3)
        answer = await d.post(PATH, input=["a", "b"])
        assert refusal(answer, 429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "3"
        assert d.fleet.num_running == 0


async def test_a_client_that_leaves_and_a_deadline_end_what_runs() -> None:
    async with desk() as d:
        d.fleet.gate.clear()
        client = RawClient(d.app, {"input": ["a", "b", "c"]}, PATH)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.run())
            await until(lambda: d.fleet.num_running == 3)
            client.leave.set()
        assert d.fleet.num_running == 0
        assert not client.sent
        late = await d.http.post(PATH, json={"input": "a"}, headers={"x-request-timeout-ms": "20"})
        assert refusal(late, 408)["code"] == "deadline_exceeded"
        assert d.fleet.num_running == 0
