"""A client for one question: streams the answer of a chat to the terminal, as any client over HTTP would get it."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys

from cluster.bench.sse_client import HttpError, Target, post_events
from cluster.commands.service_client import bearer, opened

ANSWER_TOKENS = 256
PROBE_TIMEOUT_S = 5.0


def is_ready(url: str) -> bool:
    """Whether the service at `url` says that it can serve."""
    try:
        with opened(f"{url}/ready", patience_s=PROBE_TIMEOUT_S) as answer:
            ready: bool = answer.status == 200
            return ready
    except (OSError, http.client.HTTPException):
        return False


def ask(url: str, model: str, question: str, api_key: str | None = None) -> int:
    """Print question and answer; the exit code: 0, or 1 where the service did not answer."""
    print(f"\n> {question}", flush=True)
    try:
        asyncio.run(_stream_answer(url, model, question, api_key))
    except (HttpError, OSError) as error:
        print(f"raycomb: no answer: {error}", file=sys.stderr)
        return 1
    return 0


async def _stream_answer(url: str, model: str, question: str, api_key: str | None) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    async for arrival in post_events(Target.parse(url), "/v1/chat/completions", body, bearer(api_key)):
        for payload in arrival.payloads:
            event = json.loads(payload)
            if "error" in event:
                raise HttpError(event["error"]["message"])
            print("".join(choice["delta"].get("content") or "" for choice in event["choices"]), end="", flush=True)
    print(flush=True)
