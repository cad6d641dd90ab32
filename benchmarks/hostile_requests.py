"""Malformed requests, made by hypothesis, and what a service makes of them: bytes of HTTP, JSON bodies, protobuf.

The same seed makes the same requests, so a number names one. Not for slow clients: `benchmarks.hostile_connections`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
import hypothesis
import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, settings

from protos import inference_pb2 as pb

T = TypeVar("T")

ANSWER_WITHIN_S: Final = 20.0
DEADLINE_MS: Final = 2000
"""What happens to be valid may ask for hours of tokens."""

BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}},
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "logprobs": 1, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"b": {"type": "integer"}}}},
            },
        },
    ),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/sessions", {}),
)
MESSAGES: Final = (
    ("Generate", pb.GenerateRequest(prompt="hello", max_tokens=2, stop=["x"], temperature=0.5)),
    ("Generate", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), max_tokens=2, n=2, seed=-1)),
    ("Tokenize", pb.TokenizeRequest(text="hello")),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 6])),
    ("ListModels", pb.ListModelsRequest()),
)
STRANGE_HEADERS: Final = (
    b"transfer-encoding: chunked",
    b"connection: upgrade",
    b"x: " + b"y" * 9000,
    b"x-request-id: \xff",
    b"x-session-id: \xff",
    b"x-request-timeout-seconds: \xff",
    b"x-request-disconnect-disabled: ?1",
    b"serve_multiplexed_model_id: \xff",
    b"traceparent: \xff",
    b"authorization: \xff",
)
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW")
STRANGE_PATHS: Final = ("/", "//", "/v1", "/%00", "/v1/completions/", "/..%2f..", "/debug/kv", "/v1/models/x/y", "*")

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([1e308, -0.0, "\x00", "\ud7ff", 2**63, "auto", "json_object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True, slots=True)
class HttpCase:
    """A request whose frame is HTTP's and whose body is anything."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class GrpcCase:
    """A call of a method with anything as its message."""

    method: str
    message: bytes


@dataclass(slots=True)
class Outcomes:
    """How requests ended: HTTP statuses and gRPC codes by number of requests; "closed" without an answer.

    `faults`: those that nothing may end with, each with the number of its case.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, number: int, kind: str, outcome: str, *, is_fault: bool) -> None:
        self.counts[f"{kind} {outcome}"] += 1
        if is_fault:
            self.faults.append(f"{kind} case {number}: {outcome}")


def made(strategy: st.SearchStrategy[T], count: int, seed: int) -> list[T]:
    """`count` examples."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(case: T) -> None:
        found.append(case)

    collect()
    return found


@st.composite
def mangled(draw: st.DrawFn, data: bytes) -> bytes:
    """The data with a few pieces cut, doubled, replaced or put in."""
    bytes_ = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(bytes_)))
        length = draw(st.integers(0, 8))
        match draw(st.sampled_from(["cut", "put", "replace", "double", "truncate"])):
            case "cut":
                del bytes_[at : at + length]
            case "put":
                bytes_[at:at] = draw(st.binary(max_size=16))
            case "replace":
                bytes_[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "double":
                bytes_[at:at] = bytes_[at : at + length]
            case _:
                del bytes_[at:]
    return bytes(bytes_)


@st.composite
def changed(draw: st.DrawFn, body: Any) -> Any:
    """The JSON value with one part of it replaced by any other, or with a field more."""
    if isinstance(body, dict) and (not body or draw(st.integers(0, 3)) == 0):
        return body | {draw(st.text(max_size=10)): draw(JSON_VALUES)}
    if isinstance(body, dict) and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(body)))
        return body | {key: draw(changed(body[key]))}
    if isinstance(body, list) and body and draw(st.booleans()):
        at = draw(st.integers(0, len(body) - 1))
        return [*body[:at], draw(changed(body[at])), *body[at + 1 :]]
    if isinstance(body, dict):
        return body | {draw(st.sampled_from(sorted(body))): draw(JSON_VALUES)}
    return draw(JSON_VALUES)


@st.composite
def http_cases(draw: st.DrawFn) -> HttpCase:
    """A body of an endpoint: mangled, changed, nested too deeply, or nothing that was ever one."""
    path, body = draw(st.sampled_from(BODIES))
    match draw(st.integers(0, 9)):
        case 0:
            return HttpCase(path, draw(st.binary(max_size=200)))
        case 1:
            depth = draw(st.integers(1, 50_000))
            return HttpCase(path, b'{"prompt":' + draw(st.sampled_from([b"[", b'{"a":'])) * depth)
        case 2 | 3 | 4:
            return HttpCase(path, draw(mangled(json.dumps(body).encode())))
        case _:
            return HttpCase(path, json.dumps(draw(changed(body))).encode())


@st.composite
def http_bytes(draw: st.DrawFn) -> bytes:
    """A whole request, its frame mangled as well."""
    path, body = draw(st.sampled_from(BODIES))
    data = json.dumps(body).encode()
    length = draw(st.sampled_from([len(data), len(data), len(data) + 5, 0, -1, 10**20]))
    headers = [
        b"%s %s HTTP/1.1" % (draw(st.sampled_from(METHODS)).encode(), draw(paths(path)).encode()),
        b"host: service",
        b"content-type: application/json",
        b"content-length: %d" % length,
        b"x-request-timeout-ms: %d" % DEADLINE_MS,
        *draw(st.lists(st.sampled_from(STRANGE_HEADERS), max_size=2)),
    ]
    whole = b"\r\n".join(headers) + b"\r\n\r\n" + data
    return draw(mangled(whole)) if draw(st.booleans()) else whole


def paths(usual: str) -> st.SearchStrategy[str]:
    return st.just(usual) | st.sampled_from(STRANGE_PATHS)


@st.composite
def grpc_cases(draw: st.DrawFn) -> GrpcCase:
    method, message = draw(st.sampled_from(MESSAGES))
    if draw(st.integers(0, 4)) == 0:
        return GrpcCase(method, draw(st.binary(max_size=200)))
    return GrpcCase(method, draw(mangled(message.SerializeToString())))


async def send_bytes(host: str, port: int, cases: Sequence[bytes], outcomes: Outcomes, *, at_once: int) -> None:
    """Each over a connection of its own, of which the sending half is then closed."""

    async def send(number: int, data: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            writer.write_eof()
            line = await asyncio.wait_for(reader.readline(), ANSWER_WITHIN_S)
            status = line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "closed"
        except TimeoutError:
            status = "silent"
        except (OSError, IndexError):
            status = "closed"
        finally:
            writer.close()
        outcomes.note(number, "bytes", status, is_fault=status == "silent" or is_fault(status))

    await in_turn(send, cases, at_once)


async def send_bodies(host: str, port: int, cases: Sequence[HttpCase], outcomes: Outcomes, *, at_once: int) -> None:
    """Each as a well-framed POST, read to the end of its answer."""

    async def send(number: int, case: HttpCase) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = (
                f"POST {case.path} HTTP/1.1\r\nhost: service\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"x-request-timeout-ms: {DEADLINE_MS}\r\ncontent-length: {len(case.body)}\r\n\r\n"
            )
            writer.write(head.encode() + case.body)
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(), ANSWER_WITHIN_S)
            status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "closed"
        except TimeoutError:
            status = "silent"
        except OSError:
            status = "closed"
        finally:
            writer.close()
        outcomes.note(number, "body", status, is_fault=status in ("silent", "closed") or is_fault(status))

    await in_turn(send, cases, at_once)


def is_fault(status: str) -> bool:
    """Of ours: only 503 is a documented one."""
    return status.startswith("5") and status != "503"


async def send_messages(target: str, cases: Sequence[GrpcCase], outcomes: Outcomes, *, at_once: int) -> None:
    """Each as a call with a deadline. Faults are the codes that stand for 5xx but 503."""
    faulty = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:

        async def send(number: int, case: GrpcCase) -> None:
            method, code = f"/raycomb.v1.Inference/{case.method}", grpc.StatusCode.OK
            details = ""
            try:
                if case.method == "Generate":
                    async for _ in channel.unary_stream(method, None, None)(case.message, timeout=DEADLINE_MS / 1000):
                        pass
                else:
                    await channel.unary_unary(method, None, None)(case.message, timeout=ANSWER_WITHIN_S)
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
            told = f"{code.name} {details[:120]}" if code in faulty else code.name
            outcomes.note(number, "grpc", told, is_fault=code in faulty)

        await in_turn(send, cases, at_once)


async def in_turn(send: Any, cases: Sequence[Any], at_once: int) -> None:
    """`send(number, case)` for all cases, so many at once."""
    waiting = iter(enumerate(cases))

    async def work() -> None:
        for number, case in waiting:
            await send(number, case)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
