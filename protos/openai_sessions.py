"""The bodies that the endpoints of sessions accept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from protos.openai_body import Body


class OpenBody(Body):
    """POST /v1/sessions. `metadata` is for the client's own books."""

    model: str | None = None
    metadata: dict[str, JsonValue] | None = None


class ForkBody(Body):
    """POST /v1/sessions/{id}/fork. `at`: how many tokens the fork keeps; all where it does not say."""

    at: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
