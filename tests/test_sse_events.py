"""The tests' own reader of streamed answers cuts events where the standard does and nowhere else."""

from __future__ import annotations

import json

import httpx

from tests.sse_events import events_of

# Every mark that `str.splitlines` takes for a line's end and JSON may hold as it is.
MARKS = "\x85\u2028\u2029"


async def test_a_line_mark_within_a_text_ends_no_event() -> None:
    told = [{"text": f"a{MARKS}b"}, {"text": "c"}]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in told) + "data: [DONE]\n\n"
    response = httpx.Response(200, content=body.encode())
    assert [event async for event in events_of(response)] == told
