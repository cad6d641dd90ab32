"""The official OpenAI client, synchronous and not, against the real service with a real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.service_process import ServiceProcess
from tests.service_state import ServiceState

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(290)]

MODEL = "smollm2-135m"
PARIS = "The capital of France is"
COUNT = "1, 2, 3, 4, 5, 6,"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PATIENCE_S = 120.0


@pytest.fixture
def client(smollm2_service: ServiceProcess, api_key: str) -> Iterator[openai.OpenAI]:
    url, http = f"{smollm2_service.url}/v1", openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=PATIENCE_S, http_client=http) as made:
        yield made


@pytest.fixture
async def async_client(smollm2_service: ServiceProcess, api_key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    url, http = f"{smollm2_service.url}/v1", openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=url, api_key=api_key, max_retries=0, timeout=PATIENCE_S, http_client=http
    ) as made:
        yield made


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    asked: Any = {"model": MODEL, "prompt": COUNT, "max_tokens": 8, "temperature": 0, **changes}
    return client.completions.create(**asked)


def test_a_greedy_answer_names_paris(client: openai.OpenAI) -> None:
    assert "Paris" in complete(client, prompt=PARIS).choices[0].text
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
    assert chat.choices[0].message.role == "assistant"
    assert "Paris" in (chat.choices[0].message.content or "")


def test_a_streamed_completion_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    endings = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert endings == [whole.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_streamed_chat_says_what_the_whole_one_says(async_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12}
    whole = await async_client.chat.completions.create(**asked)
    stream = await async_client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert all(chunk.usage is None for chunk in chunks)


def test_three_choices_of_a_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    asked: Any = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 11, "max_tokens": 8}
    whole = complete(client, n=3, **asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens <= 3 * 8
    streamed = ["", "", ""]
    for chunk in complete(client, n=3, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert complete(client, **asked).choices[0].text == texts[0], "n = 1 draws what the first of three draws"
    assert complete(client, **(asked | {"seed": 12})).choices[0].text != texts[0]


def test_a_stop_string_is_hidden_and_ends_the_answer(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[3:5]
    before = text[: text.index(stop)]
    (choice,) = complete(client, stop=[stop, "never said"]).choices
    assert (choice.text, choice.finish_reason) == (before, "stop")
    streamed = list(complete(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == before
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_have_the_shape_of_each_endpoint(client: openai.OpenAI) -> None:
    flat = complete(client, prompt=PARIS, max_tokens=3, logprobs=2).choices[0]
    assert "".join(flat.logprobs.tokens) == flat.text
    assert flat.logprobs.text_offset == [len("".join(flat.logprobs.tokens[:i])) for i in range(3)]
    assert flat.logprobs.token_logprobs == [max(top.values()) for top in flat.logprobs.top_logprobs]
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    ).choices[0]
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert bytes(byte for token in content for byte in token.bytes or []).decode() == chat.message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)


def test_streamed_log_probabilities_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 5, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs
    assert whole is not None
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=2, stream=True):
        scores = chunk.choices[0].logprobs
        streamed += (scores.content or []) if scores is not None else []
    assert [(t.token, t.bytes) for t in streamed] == [(t.token, t.bytes) for t in whole.content or []]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in whole.content or []])


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask(client: openai.OpenAI) -> None:
    scored = complete(client, prompt=f"{PARIS} Paris", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == f"{PARIS} Paris"
    assert "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-1] > -3, "the model expects Paris"
    echoed = complete(client, prompt=PARIS, max_tokens=2, echo=True).choices[0].text
    assert echoed == PARIS + complete(client, prompt=PARIS, max_tokens=2).choices[0].text


def test_prompts_in_a_list_are_answered_each_like_alone(client: openai.OpenAI) -> None:
    prompts = [PARIS, COUNT, "def add(a, b):"]
    together = complete(client, prompt=prompts, max_tokens=5)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [complete(client, prompt=prompt, max_tokens=5) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


async def test_a_crowd_hears_each_its_own_answer(async_client: openai.AsyncOpenAI) -> None:
    async def ask(prompt: str) -> str:
        answer = await async_client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        return answer.choices[0].text

    prompts = [PARIS, COUNT, "The opposite of hot is", "red, green, blue, red, green,"]
    alone = [await ask(prompt) for prompt in prompts]
    assert await asyncio.gather(*(ask(prompt) for prompt in prompts * 4)) == alone * 4


def test_a_streamed_response_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert "Paris" in whole.output_text
    last: Any = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_vectors_of_like_texts_are_nearer_than_others(client: openai.OpenAI) -> None:
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "def add(a, b): return a + b"]
    told = client.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": "mean"})
    first, like, other = [one.embedding for one in told.data]
    assert len(first) == 576
    near, far = (sum(a * b for a, b in zip(first, vector, strict=True)) for vector in (like, other))
    assert 1.0 >= near > far
    alone = client.embeddings.create(model=MODEL, input=texts[0], extra_body={"pooling": "mean"}).data[0].embedding
    assert alone == pytest.approx(first, abs=1e-4)


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_cannot_be_is_a_bad_request_that_names_the_parameter(
    client: openai.OpenAI, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **changes)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_each_wrong_has_the_clients_own_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()


def test_a_deadline_of_the_client_is_an_error_and_frees_its_cells(
    client: openai.OpenAI, smollm2_state: ServiceState
) -> None:
    asked: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, extra_headers={"x-request-timeout-ms": "300"}, **asked)
    assert caught.value.status_code == 408
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.5), **asked)
    assert_idle(smollm2_state)


def test_a_stream_that_is_closed_early_frees_its_cells(client: openai.OpenAI, smollm2_state: ServiceState) -> None:
    for n in (1, 3):
        stream = complete(client, n=n, max_tokens=2000, extra_body={"ignore_eos": True}, stream=True)
        next(iter(stream))
        state = smollm2_state.ask()
        assert [gateway["num_requests"] for gateway in state["gateways"]] == [1], "what runs is seen"
        assert max(worker["num_running"] for worker in state["workers"]) >= 1
        assert max(worker["owned_cells"] for worker in state["workers"]) >= 1
        stream.close()
    assert_idle(smollm2_state)


def assert_idle(service: ServiceState) -> None:
    state = service.wait_until_idle(20)
    assert len(state["workers"]) == 2
    for worker in state["workers"]:
        assert worker["free_cells"] + worker["cached_cells"] == worker["capacity"]
        assert (worker["num_running"], worker["num_waiting"]) == (0, 0)
    assert [gateway["num_requests"] for gateway in state["gateways"]] == [0]
