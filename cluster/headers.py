"""What a client may say beside its request, in HTTP headers or gRPC metadata alike: its key, its id, its deadline."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Iterable
from typing import Final

from pydantic import SecretStr

from planner.errors import InvalidRequest, Unauthenticated

REQUEST_ID: Final = "x-request-id"
DEADLINE: Final = "x-request-timeout-ms"
_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(given: str) -> str:
    """The client's own id of its request, or a new one where it gave none that can be echoed."""
    return given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex


def deadline_s(value: str | None) -> float | None:
    """Seconds that the client gives the whole request; None: no deadline. Raises `InvalidRequest`."""
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value[:20]) == 0:
        raise InvalidRequest(f"{DEADLINE} must be a whole number of milliseconds above 0", param=DEADLINE)
    milliseconds = int(value[:20])
    return milliseconds / 1000 if milliseconds < 2**31 else None


class ApiKeys:
    """The keys that open the service; without any it is open to all."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._keys = [key.get_secret_value().encode() for key in keys]

    def check(self, authorization: str) -> None:
        """Raises `Unauthenticated` unless the value of an authorization header is `Bearer` and one of the keys."""
        if not self._keys:
            return
        kind, _, key = authorization.partition(" ")
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise Unauthenticated("a valid API key is needed: Authorization: Bearer <key>")
