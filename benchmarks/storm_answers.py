"""Requests with one right answer each, the clients who ask them over HTTP and gRPC, and what they were told.

Used by `benchmarks.failover_storm`: an answer of a disturbed run is compared with that of the undisturbed one, word for
word and token for token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc

from cluster.bench.sse_client import HttpError, Target, post_events
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

SAME_LOGPROB = 1e-4
"""Another batch shape rounds logits otherwise, by some 1e-6."""

STARTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "def fibonacci(n):",
    "Once upon a time, in a mill by the river,",
    "Water boils at",
    "A list of animals:",
)


class Road(Enum):
    """How a client asks."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `fields` have the names that HTTP and gRPC share."""

    road: Road
    n: int
    fields: dict[str, Any]


def the_asks(count: int, *, least_tokens: int, most_tokens: int, roads: tuple[Road, ...] = tuple(Road)) -> list[Ask]:
    """Temperatures 0, 0.7 and 1, n from 1 to 3, seeds, penalties, stop strings and log probabilities, mixed."""
    asks = []
    for number in range(count):
        fields: dict[str, Any] = {
            "prompt": f"{STARTS[number % len(STARTS)]}" + " and" * (number // len(STARTS)),
            "max_tokens": least_tokens + (37 * number) % (most_tokens - least_tokens + 1),
            "temperature": (0.0, 0.7, 1.0)[number % 3],
            "seed": 100 + number,
        }
        fields |= {"logprobs": 2} if number % 4 in (1, 2) else {}
        fields |= {"presence_penalty": 0.8, "repetition_penalty": 1.2} if number % 5 == 3 else {}
        fields |= {"stop": [" the", "\n\n\n"], "min_tokens": 3} if number % 7 == 4 else {"ignore_eos": True}
        n = 1 + number // 3 % 3
        asks.append(Ask(roads[number % len(roads)], n, fields | {"n": n}))
    return asks


@dataclass(slots=True)
class Answer:
    """All that a client was told, put together by choice; `error` where it was told that it failed.

    `tokens` are ids over gRPC; over HTTP their texts, where log probabilities were asked for. `ended_at` is on the
    monotonic clock.
    """

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[int | str]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    endings: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    ended_at: dict[int, float] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str | None = None

    def differences(self, right: Answer) -> list[str]:
        """What is not as in the right answer, in words; nothing if all is."""
        if self.error is not None:
            return [f"error: {self.error}"]
        found = [
            f"{name}: {mine} is not {theirs}"
            for name, mine, theirs in (
                ("texts", dict(self.texts), dict(right.texts)),
                ("tokens", dict(self.tokens), dict(right.tokens)),
                ("offsets", dict(self.offsets), dict(right.offsets)),
                ("endings", dict(self.endings), dict(right.endings)),
                ("usage", self.usage, right.usage),
                ("number of logprobs", _lengths(self.logprobs), _lengths(right.logprobs)),
            )
            if mine != theirs
        ]
        found += [f"choice {index} ended {len(ends)} times" for index, ends in self.endings.items() if len(ends) != 1]
        if not found and self.farthest_logprob(right) > SAME_LOGPROB:
            found.append(f"log probabilities differ by up to {self.farthest_logprob(right):g}")
        return found

    def farthest_logprob(self, right: Answer) -> float:
        """The largest difference between two log probabilities of the same token."""
        pairs = [
            (mine, theirs)
            for index in right.logprobs
            for mine, theirs in zip(self.logprobs[index], right.logprobs[index], strict=False)
        ]
        return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)

    def end(self, index: int, reason: str) -> None:
        self.endings[index].append(reason)
        self.ended_at[index] = time.monotonic()

    def take_event(self, event: dict[str, Any]) -> None:
        """An event of a stream over HTTP."""
        if "error" in event:
            self.error = f"event {event['error']['code']}"
            return
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] += choice["text"]
            if (scores := choice.get("logprobs")) is not None:
                self.tokens[index] += scores["tokens"]
                self.offsets[index] += scores["text_offset"]
                for logprob, best in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
                    self.logprobs[index] += [logprob, *sorted(best.values())]
            if choice["finish_reason"] is not None:
                self.end(index, choice["finish_reason"])

    def take_message(self, message: pb.GenerateResponse) -> None:
        """A message of a stream over gRPC."""
        if message.HasField("usage"):
            self.usage = message.usage.prompt_tokens, message.usage.completion_tokens
        for choice in message.choices:
            index = choice.index
            self.texts[index] += choice.text
            self.tokens[index] += choice.token_ids
            for score in choice.logprobs:
                self.offsets[index].append(score.text_offset)
                self.logprobs[index] += [score.chosen.logprob, *sorted(top.logprob for top in score.top)]
            if choice.finish_reason:
                self.end(index, pb.FinishReason.Name(choice.finish_reason))


class Crowd:
    """Everybody who asks, at once. `heard` is called with the number of events so far, all answers together."""

    def __init__(
        self, url: str, grpc_target: str | None, model: str, heard: Callable[[int], None] = lambda _: None
    ) -> None:
        self._target = Target.parse(url)
        self._grpc_target = grpc_target
        self._model = model
        self._heard = heard
        self.num_events = 0

    async def ask_all(self, asks: list[Ask]) -> list[Answer]:
        return list(await asyncio.gather(*map(self._ask, asks)))

    async def _ask(self, ask: Ask) -> Answer:
        answer = Answer()
        await (self._ask_http if ask.road is Road.HTTP else self._ask_grpc)(ask, answer)
        if answer.error is not None:
            now = time.monotonic()
            for index in range(ask.n):
                answer.ended_at.setdefault(index, now)
        return answer

    async def _ask_http(self, ask: Ask, answer: Answer) -> None:
        body = ask.fields | {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async for arrival in post_events(self._target, "/v1/completions", body):
                for payload in arrival.payloads:
                    answer.take_event(json.loads(payload))
                    self._note()
        except (HttpError, OSError) as error:
            answer.error = str(error)

    async def _ask_grpc(self, ask: Ask, answer: Answer) -> None:
        assert self._grpc_target is not None
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._grpc_target, options=options) as channel:
            try:
                async for message in pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(**ask.fields)):
                    answer.take_message(message)
                    self._note()
            except grpc.aio.AioRpcError as error:
                answer.error = f"{error.code().name} {error.details()}"

    def _note(self) -> None:
        self.num_events += 1
        self._heard(self.num_events)


def _lengths(lists: dict[int, list[float | None]]) -> dict[int, int]:
    return {index: len(entries) for index, entries in lists.items() if entries}
