"""What a client may say beside its request, in HTTP headers or gRPC metadata alike: id, deadline and tenant."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.access.tenants import A_TENANT, GOOD_TENANT
from cluster.telemetry.request_record import RequestRecord
from planner.errors import InvalidRequest

REQUEST_ID: Final = "x-request-id"
DEADLINE: Final = "x-request-timeout-ms"
TENANT: Final = "x-tenant"
BACKSTOP_S: Final = 0.25
"""A worker ends a request between two steps, and its word needs a moment to come."""

_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(given: str) -> str:
    """The client's own id of its request, or a new one where it gave none that can be echoed."""
    return given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex


def deadline_s(value: str | None) -> float | None:
    """Seconds that the client gives the whole request; None: no deadline. Raises `InvalidRequest`."""
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value[:20]) == 0:
        raise InvalidRequest(
            f"{DEADLINE} must be a whole number of milliseconds above 0, not {value[:20]!a}", param=DEADLINE
        )
    milliseconds = int(value[:20])
    return milliseconds / 1000 if milliseconds < 2**31 else None


@dataclass(frozen=True, slots=True)
class Terms:
    """On whose account a request runs, until when, and where it is recorded. Times are on `time.monotonic`'s clock."""

    tenant: str = ""
    deadline: float | None = None
    arrived_at: float = field(default_factory=time.monotonic, compare=False)
    record: RequestRecord = field(default_factory=RequestRecord, compare=False, repr=False)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, negative after it; None: there is none."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def patience_s(self) -> float | None:
        """How long a gateway waits: a little longer than a worker takes to say that the deadline has come."""
        left_s = self.left_s
        return None if left_s is None else left_s + BACKSTOP_S


def terms(deadlines: Sequence[str], tenants: Sequence[str], account: str, record: RequestRecord | None = None) -> Terms:
    """The terms of a request that came now, of what was sent under `DEADLINE` and `TENANT`; the nearest deadline holds.

    `account` is the tenant of a request that names none. Raises `InvalidRequest`.
    """
    given = [seconds for value in deadlines if (seconds := deadline_s(value)) is not None]
    if len(set(tenants)) > 1 or not all(map(GOOD_TENANT.fullmatch, tenants)):
        raise InvalidRequest(f"{TENANT} must be {A_TENANT}", param=TENANT)
    now, record = time.monotonic(), record or RequestRecord()
    record.tenant = tenants[0] if tenants else account
    return Terms(record.tenant, now + min(given) if given else None, now, record)
