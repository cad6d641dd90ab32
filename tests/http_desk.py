"""What the HTTP tests share: an application over a scripted fleet, a client for it, and one that speaks raw ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from opentelemetry.trace import NoOpTracer, Tracer

from cluster.adapters.desk import AdapterDesk
from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.language.text import TextModel
from cluster.models import single
from cluster.routing.fleet import ServedModel
from cluster.sessions.owner import SessionOwner
from cluster.telemetry.request_log import Tell
from cluster.web.api import create_app
from planner.request import Request
from tests.fake_fleet import FakeFleet
from tests.tiny_text import EOS, tiny_text

TEXT = tiny_text()
VOCAB = TEXT.vocab_size
MODEL = ServedModel(
    name="tiny", created=1700000000, vocab_size=VOCAB, context=64, capacity=256, max_num_seqs=8, vector_size=4
)
PROMPT = {"prompt": "hello", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def says(*texts: str, ends: bool = True) -> Callable[[Request, int], list[int]]:
    """The i-th sequence says the i-th text (the last one for the rest), and then the end token."""
    spoken = [TEXT.encode(text) + ([EOS] if ends else []) for text in texts]
    return lambda request, index: spoken[min(index, len(spoken) - 1)]


@dataclass
class Desk:
    """A client, the application's fleet, and the application."""

    http: httpx.AsyncClient
    fleet: FakeFleet
    app: Any

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        answer = await self.post(path, **body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream"
        return parse_events(answer.text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def joined(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def endings(events: list[Any]) -> dict[int, list[str]]:
    told: dict[int, list[str]] = {}
    for event in events:
        for choice in [] if event == "[DONE]" else event["choices"]:
            told.setdefault(choice["index"], [])
            if choice["finish_reason"] is not None:
                told[choice["index"]].append(choice["finish_reason"])
    return told


@asynccontextmanager
async def desk(
    script: Any = None,
    *,
    text: TextModel = TEXT,
    model: ServedModel | None = MODEL,
    fleet: Any = None,
    tracer: Tracer | None = None,
    tell: Tell | None = None,
    sessions: SessionOwner | None = None,
    adapters: AdapterDesk | None = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    fleet = fleet or FakeFleet(model, script or says("hi there"))
    service = Service(
        fleet,
        text,
        ApiSettings(**settings),
        model_name="tiny",
        sessions=sessions,
        adapters=adapters,
        tracer=tracer or NoOpTracer(),
        tell=tell,
    )
    app = create_app(single(service))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Desk(http, fleet, app)


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@dataclass
class RawClient:
    """Speaks ASGI itself, so that it can leave at an exact moment. `sent` is what the application has written."""

    app: Any
    body: dict[str, Any]
    path: str = "/v1/completions"
    deadline_ms: int | None = None

    def __post_init__(self) -> None:
        self.sent: list[Any] = []
        self.news = asyncio.Event()
        self.leave = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.asked = False

    async def receive(self) -> Any:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)
        self.news.set()

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"x-request-timeout-ms", str(self.deadline_ms).encode())] if self.deadline_ms else [],
            "server": ("gateway", 80),
            "client": ("client", 1),
        }
        await self.app(scope, self.receive, self.send)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition is a fake's state, which tells nobody
            await asyncio.sleep(0.001)
