"""The gRPC service for clients: what it understands, what it says, and its health."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import inference_pb2 as pb
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import endings, failure, grpc_desk, ids_of, request, text_of, trailer
from tests.http_desk import MODEL, TEXT, VOCAB, desk, joined, says
from tests.tiny_text import EOS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_prompt_is_answered_in_text_and_tokens_as_they_come() -> None:
    async with grpc_desk(says("hi there")) as client:
        messages = await client.generate(max_tokens=20)
        assert text_of(messages) == "hi there"
        assert ids_of(messages) == [*TEXT.encode("hi there"), EOS]
        assert len(messages) > 3
        assert endings(messages) == {0: ["FINISH_REASON_STOP"]}


async def test_usage_comes_once_with_the_last_message_and_once_with_the_end_of_each_choice() -> None:
    fleet = FakeFleet(MODEL, says("hi", "hi there"), num_cached=1)
    async with grpc_desk(fleet=fleet) as client:
        messages = await client.generate(n=2, max_tokens=20)
        assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
        usage = messages[-1].usage
        lengths = [len(TEXT.encode(text)) + 1 for text in ("hi", "hi there")]
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (1, sum(lengths), 1)
        last = {c.index: c for message in messages for c in message.choices if c.finish_reason}
        assert [last[index].usage.completion_tokens for index in (0, 1)] == lengths


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"prompt": "hello", "max_tokens": 6}, {"prompt": "hello", "max_tokens": 6}),
        ({"ids": [5, 6, 7], "max_tokens": 6}, {"prompt": [5, 6, 7], "max_tokens": 6}),
        ({"prompt": "hello", "n": 3, "max_tokens": 9}, {"prompt": "hello", "n": 3, "max_tokens": 9}),
        ({"prompt": "hello", "stop": ["there"]}, {"prompt": "hello", "stop": ["there"]}),
        ({"prompt": "hello", "logprobs": 2}, {"prompt": "hello", "logprobs": 2}),
        (
            {"prompt": "hello", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": -3},
            {"prompt": "hello", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": -3},
        ),
        (
            {"prompt": "hello", "presence_penalty": 0.3, "frequency_penalty": -0.3, "repetition_penalty": 1.1},
            {"prompt": "hello", "presence_penalty": 0.3, "frequency_penalty": -0.3, "repetition_penalty": 1.1},
        ),
        (
            {"prompt": "hello", "logit_bias": {7: -100.0}, "stop_token_ids": [9], "ignore_eos": True, "priority": -2},
            {"prompt": "hello", "logit_bias": {"7": -100.0}, "stop_token_ids": [9], "ignore_eos": True, "priority": -2},
        ),
        ({"prompt": "hello", "min_tokens": 2, "add_special_tokens": False}, {"prompt": "hello", "min_tokens": 2}),
        (
            {"prompt": "hello", "bad_words": ["you"], "stop": ["there"], "include_stop_str_in_output": True},
            {"prompt": "hello", "bad_words": ["you"], "stop": ["there"], "include_stop_str_in_output": True},
        ),
        (
            {"prompt": "hello world", "truncate_prompt_tokens": 2},
            {"prompt": "hello world", "truncate_prompt_tokens": 2},
        ),
        ({"prompt": "hello", "echo": True, "stop": ["there"]}, {"prompt": "hello", "echo": True, "stop": ["there"]}),
        ({"ids": [5, 6, 7], "echo": True, "n": 2}, {"prompt": [5, 6, 7], "echo": True, "n": 2}),
        ({"prompt": "hello", "n": 1, "best_of": 3}, {"prompt": "hello", "n": 1, "best_of": 3}),
    ],
)
async def test_grpc_and_http_ask_workers_the_same_and_say_the_same(fields: Any, body: Any) -> None:
    script = says("hi there", "oh, there you are", "there")
    seeded = {"seed": 1}
    async with grpc_desk(script) as client, desk(script) as http:
        messages = await client.generate(**(seeded | fields))
        answer = (await http.post("/v1/completions", **(seeded | body))).json()
        ours, theirs = client.fleet.requests[0], http.fleet.requests[0]
        assert ours.prompt.tolist() == theirs.prompt.tolist()
        for name in ("max_tokens", "sampling", "min_tokens", "stop_token_ids", "n", "priority"):
            assert getattr(ours, name) == getattr(theirs, name)
        reasons = {"stop": "FINISH_REASON_STOP", "length": "FINISH_REASON_LENGTH"}
        for choice in answer["choices"]:
            assert text_of(messages, choice["index"]) == choice["text"]
            assert endings(messages)[choice["index"]] == [reasons[choice["finish_reason"]]]
        usage = messages[-1].usage
        told = answer["usage"]
        assert (usage.prompt_tokens, usage.completion_tokens) == (told["prompt_tokens"], told["completion_tokens"])


async def test_a_prompt_is_echoed_alone_and_with_its_log_probabilities() -> None:
    async with grpc_desk() as client, desk() as http:
        asked = {"prompt": "hello world", "echo": True}
        (alone,) = await client.generate(**asked, max_tokens=0)
        assert text_of([alone]) == "hello world"
        assert endings([alone]) == {0: ["FINISH_REASON_LENGTH"]}
        assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (len(TEXT.encode("hello world")), 0)
        assert client.fleet.requests == []
        messages = await client.generate(**asked, max_tokens=2, logprobs=1)
        answer = (await http.post("/v1/completions", **asked, max_tokens=2, logprobs=1)).json()["choices"][0]
        assert text_of(messages) == answer["text"]
        assert ids_of(messages) == TEXT.encode("hi there")[:2], "the prompt's are not among them"
        scores = [score for message in messages for choice in message.choices for score in choice.logprobs]
        told = [score.chosen.logprob if score.chosen.HasField("logprob") else None for score in scores]
        assert told == answer["logprobs"]["token_logprobs"]
        assert [score.text_offset for score in scores] == answer["logprobs"]["text_offset"]


async def test_log_probabilities_of_a_prompt_come_with_the_last_message() -> None:
    async with grpc_desk() as client, desk() as http:
        for fields, path, body in (
            ({"prompt": "hello world"}, "/v1/completions", {"prompt": "hello world"}),
            (
                {"messages": [("user", "hello")]},
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hello"}]},
            ),
        ):
            messages = await client.generate(**fields, max_tokens=2, prompt_logprobs=1)
            answer = (await http.post(path, **body, max_tokens=2, prompt_logprobs=1)).json()
            theirs = answer["choices"][0].get("prompt_logprobs") or answer["prompt_logprobs"]
            assert not any(message.prompt_logprobs for message in messages[:-1])
            assert not any(choice.logprobs for message in messages for choice in message.choices)
            ours = messages[-1].prompt_logprobs
            assert len(ours) == len(theirs) > 1
            assert not ours[0].chosen.HasField("logprob")
            for mine, other in zip(ours[1:], theirs[1:], strict=True):
                assert mine.chosen.logprob == other[str(mine.chosen.token_id)]["logprob"]
                assert len(mine.top) == 1


async def test_the_best_choices_come_once_all_have_ended_with_their_scores_only_where_asked_for() -> None:
    script = says("hi", "hi there", "there")
    async with grpc_desk(script) as client:
        (message,) = await client.generate(n=2, best_of=3, max_tokens=20)
        assert [choice.index for choice in message.choices if choice.finish_reason] == [0, 1]
        assert not any(choice.logprobs for choice in message.choices)
        (message,) = await client.generate(n=1, best_of=3, max_tokens=20, logprobs=0)
        assert all(choice.logprobs for choice in message.choices if choice.text)
        refused = await failure(client, n=3, best_of=2)
        assert (refused.code(), trailer(refused, "error-param")) == (grpc.StatusCode.INVALID_ARGUMENT, "best_of")


@pytest.mark.parametrize("field", ["echo", "best_of", "use_beam_search", "length_penalty"])
async def test_what_a_conversation_cannot_have_is_refused_by_name(field: str) -> None:
    async with grpc_desk() as client:
        refused = await failure(client, messages=[("user", "hello")], **{field: 2 if field != "echo" else True})
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(refused, "error-param") == field


async def test_a_conversation_is_answered_as_over_http() -> None:
    async with grpc_desk() as client, desk() as http:
        messages = await client.generate(messages=[("system", "be kind"), ("user", "hello")], logprobs=1)
        chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
        events = await http.events("/v1/chat/completions", messages=chat)
        assert text_of(messages) == joined(events)
        ours, theirs = client.fleet.requests[0], http.fleet.requests[0]
        assert ours.prompt.tolist() == theirs.prompt.tolist()
        assert ours.max_tokens == theirs.max_tokens
        assert all(len(choice.logprobs[0].top) == 1 for choice in messages[0].choices)


async def test_log_probabilities_name_token_bytes_and_offset() -> None:
    async with grpc_desk(says("hi there")) as client:
        messages = await client.generate(logprobs=2, max_tokens=2)
        scores = [score for message in messages for choice in message.choices for score in choice.logprobs]
        ids = TEXT.encode("hi there")[:2]
        assert [score.chosen.token_id for score in scores] == ids
        assert [score.chosen.text for score in scores] == [TEXT.tokens.of(token) for token in ids]
        assert [score.text_offset for score in scores] == [0, 1]
        assert [top.token_id for top in scores[0].top] == [ids[0], ids[0] + 1]
        assert scores[0].chosen.logprob == -0.5


async def test_tokens_are_told_while_their_text_may_still_become_a_stop_string() -> None:
    async with grpc_desk(says("hi there")) as client:
        messages = await client.generate(stop=["there"], max_tokens=20)
        assert text_of(messages) == "hi "
        assert len(ids_of(messages)) == messages[-1].usage.completion_tokens
        assert TEXT.decode(ids_of(messages)) == "hi there"


async def test_unset_is_the_default_and_zero_is_zero() -> None:
    async with grpc_desk() as client:
        await client.generate()
        await client.generate(temperature=0.0, top_p=1.0, seed=0)
        await client.generate(seed=0)
        unset, zero, seeded = (made.sampling for made in client.fleet.requests)
        assert unset.temperature == 1.0
        assert not unset.greedy
        assert zero.greedy
        assert zero.seed == seeded.seed == 0
        assert client.fleet.requests[0].max_tokens == 16


@pytest.mark.parametrize(("given", "told"), [("req-7", "req-7"), ("", None), ("has space", None)])
async def test_a_requests_id_comes_back(given: str, told: str | None) -> None:
    metadata = [("x-request-id", given)]
    async with grpc_desk() as client:
        stream = client.inference.Generate(request(), metadata=metadata)
        _ = [message async for message in stream]
        unary = client.inference.ListModels(pb.ListModelsRequest(), metadata=metadata)
        await unary
        refused = await failure(client, metadata, n=0)
        answered = [await stream.trailing_metadata(), await unary.trailing_metadata()]
        for trailers in [*answered, refused.trailing_metadata()]:
            own = dict(trailers)["x-request-id"]
            assert own == told if told else len(own) == 32


async def test_tokens_and_text_go_back_and_forth() -> None:
    async with grpc_desk() as client:
        made = await client.inference.Tokenize(pb.TokenizeRequest(text="hello world"))
        assert list(made.token_ids) == TEXT.encode("hello world")
        assert made.context == MODEL.context
        back = await client.inference.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids))
        assert back.text == "hello world"
        told = pb.Conversation(messages=[pb.Message(role="user", content="hello")])
        chat = await client.inference.Tokenize(pb.TokenizeRequest(conversation=told))
        assert TEXT.decode(list(chat.token_ids)).endswith("assistant:")


@pytest.mark.parametrize("kind", ["Tokenize", "Detokenize"])
async def test_a_unary_method_tells_what_is_wrong(kind: str) -> None:
    wrong = pb.TokenizeRequest() if kind == "Tokenize" else pb.DetokenizeRequest(token_ids=[VOCAB])
    async with grpc_desk() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(client.inference, kind)(wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(caught.value, "error-code") == "invalid_request"


async def test_the_models_are_those_that_http_lists() -> None:
    async with grpc_desk(served_model_names=("a", "b")) as client:
        listed = await client.inference.ListModels(pb.ListModelsRequest())
        assert [(model.name, model.context) for model in listed.models] == [("a", 64), ("b", 64)]
        assert {model.created for model in listed.models} == {MODEL.created}


async def test_before_the_first_worker_everything_is_unavailable() -> None:
    async with grpc_desk(fleet=FakeFleet(None, says("hi"), ready=False)) as client:
        assert (await failure(client)).code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.ListModels(pb.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await client.health_stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING


@pytest.mark.parametrize("service", ["", "raycomb.v1.Inference"])
async def test_a_watch_sees_every_change_and_ends_with_the_drain(service: str) -> None:
    async with grpc_desk(fleet=FakeFleet(MODEL, says("hi"), ready=False)) as client:
        watch = client.health_stub.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == NOT_SERVING
        client.fleet.ready = True
        assert (await watch.read()).status == SERVING
        client.health.drain()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        checked = await client.health_stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert checked.status == NOT_SERVING
        client.health.resume()
        checked = await client.health_stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert checked.status == SERVING


async def test_health_of_an_unknown_service_is_not_found_and_all_are_listed() -> None:
    unknown = health_pb2.HealthCheckRequest(service="other")
    async with grpc_desk() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.health_stub.Check(unknown)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = client.health_stub.Watch(unknown)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        listed = await client.health_stub.List(health_pb2.HealthListRequest())
        assert {name: told.status for name, told in listed.statuses.items()} == {
            "": SERVING,
            "raycomb.v1.Inference": SERVING,
        }
