"""Events of a streamed answer as the standard for Server-Sent Events cuts them.

Not httpx's `aiter_lines`: it ends lines at every mark that Unicode calls a line's end, and a model may say U+0085.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from cluster.bench.sse_client import EventLines


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What each event but the closing `[DONE]` says, as it comes."""
    payloads = EventLines()
    async for data in response.aiter_bytes():
        for payload in payloads.feed(data):
            if payload != b"[DONE]":
                yield json.loads(payload)
