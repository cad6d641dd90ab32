"""Clients as they are met: some stay for the whole answer, others leave at every possible moment.

Used by `benchmarks.soak`. Whoever stays must hear what the same request is always told.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing
from enum import Enum
from typing import Any

import grpc

from benchmarks.storm_answers import Answer, Ask, Road
from cluster.bench.sse_client import HttpError, Target, post_events
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

KEPT_DIFFERENCES = 5


class Leave(Enum):
    """When a client leaves."""

    NEVER = "never"
    UNHEARD = "before a word of an answer"
    MIDWAY = "midway"
    IMPATIENT = "after a while"


class Clients:
    """All clients of one service, and what they were told. Owner: one task.

    `counts` counts clients by how they left; `failed` those who stayed and were told of an error; `wrong` holds how the
    answers of others differ from what was told before.
    """

    def __init__(self, url: str, grpc_target: str, model: str, asks: list[Ask]) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self._target = Target.parse(url)
        self._grpc_target = grpc_target
        self._model = model
        self._asks = asks
        self._right: dict[int, Answer] = {}

    async def come(self, chance: random.Random) -> None:
        """One client, who stays with an even chance."""
        number = chance.randrange(len(self._asks))
        ask = self._asks[number]
        leave = Leave.NEVER if chance.random() < 0.5 else chance.choice(list(Leave)[1:])
        self.counts[leave.value] += 1
        answer = Answer()
        if leave is Leave.UNHEARD:
            await self._knock_and_run(ask, chance.uniform(0.0, 0.05))
            return
        num_events = chance.randint(1, 20) if leave is Leave.MIDWAY else None
        patience_s = chance.uniform(0.005, 1.0) if leave is Leave.IMPATIENT else None
        reading = self._read_http if ask.road is Road.HTTP else self._read_grpc
        try:
            async with asyncio.timeout(patience_s):
                await reading(ask, answer, num_events)
        except TimeoutError:
            return
        if leave is Leave.NEVER:
            self._judge(number, answer)

    def _judge(self, number: int, answer: Answer) -> None:
        if answer.error is not None:
            self.failed.append(answer.error)
            return
        differences = answer.differences(self._right.setdefault(number, answer))
        self.wrong += differences[: KEPT_DIFFERENCES - len(self.wrong)]

    def _body(self, ask: Ask) -> dict[str, Any]:
        return ask.fields | {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}

    async def _read_http(self, ask: Ask, answer: Answer, num_events: int | None) -> None:
        try:
            async with aclosing(post_events(self._target, "/v1/completions", self._body(ask))) as arrivals:
                heard = 0
                async for arrival in arrivals:
                    for payload in arrival.payloads:
                        answer.take_event(json.loads(payload))
                    heard += 1
                    if heard == num_events:
                        return
        except (HttpError, OSError) as error:
            answer.error = str(error)

    async def _read_grpc(self, ask: Ask, answer: Answer, num_events: int | None) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._grpc_target, options=options) as channel:
            call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(**ask.fields))
            try:
                heard = 0
                async for message in call:
                    answer.take_message(message)
                    heard += 1
                    if heard == num_events:
                        return
            except grpc.aio.AioRpcError as error:
                answer.error = f"{error.code().name} {error.details()}"
            finally:
                call.cancel()

    async def _knock_and_run(self, ask: Ask, after_s: float) -> None:
        """Write a request over HTTP, and be gone a moment later."""
        body = json.dumps(self._body(ask)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._target.authority}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(self._target.host, self._target.port)
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.transport.abort()
