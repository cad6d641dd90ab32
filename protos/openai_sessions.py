"""The bodies that the endpoints of sessions accept."""

from __future__ import annotations

from pydantic import JsonValue

from protos.openai_body import Body


class OpenBody(Body):
    """POST /v1/sessions. `metadata` is for the client's own books."""

    model: str | None = None
    metadata: dict[str, JsonValue] | None = None


class ForkBody(Body):
    """POST /v1/sessions/{id}/fork. `at`: how many tokens the fork keeps; all where it does not say."""

    at: int | None = None
