"""Who may use the service, on whose account, and how much: API keys, for HTTP and gRPC alike.

Keys are kept as hashes. They are compared in constant time and all of them each time, so nothing can be learned from
how long a refusal takes.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.api_settings import ApiSettings
from planner.errors import RateLimited, Unauthenticated


@dataclass(slots=True)
class KeyUse:
    """One key, and what goes on under it at this gateway. Owner: the gateway's event loop.

    * `tenant`: on whose account its requests run. `is_fixed`: they cannot name another one.
    * `max_open_requests`, `requests_per_minute`: None: without limit. As many as a minute's may come at once.
    * `is_admin`: it also opens what changes the service.
    """

    digest: bytes = field(repr=False)
    tenant: str
    is_fixed: bool
    max_open_requests: int | None
    requests_per_minute: int | None
    clock: Callable[[], float] = field(repr=False)
    num_open: int = 0
    allowance: float = 0.0
    counted_at: float = 0.0
    is_admin: bool = False

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around a request that asks for tokens. Raises `RateLimited`; it then does not count."""
        if self.max_open_requests is not None and self.num_open >= self.max_open_requests:
            raise RateLimited(
                f"this key has {self.num_open} requests open; {self.max_open_requests} may be", retry_after_s=1.0
            )
        self._take_turn()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def _take_turn(self) -> None:
        """A bucket of tokens: a minute's worth of requests at most, filled evenly."""
        limit = self.requests_per_minute
        if limit is None:
            return
        now = self.clock()
        self.allowance = min(limit, self.allowance + (now - self.counted_at) * limit / 60)
        self.counted_at = now
        if self.allowance < 1:
            wait_s = (1 - self.allowance) * 60 / limit
            raise RateLimited(f"this key may send {limit} requests a minute", retry_after_s=wait_s)
        self.allowance -= 1


class KeyRing:
    """All keys of a service. Owner: a gateway; without any key but an admin's it is open to all."""

    def __init__(self, settings: ApiSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys: list[KeyUse] = []
        for plain in settings.api_keys:
            digest = hashlib.sha256(plain.get_secret_value().encode())
            self._keys.append(KeyUse(digest.digest(), _account(digest.hexdigest()), False, None, None, clock))
        for key in settings.keys:
            self._keys.append(
                KeyUse(
                    bytes.fromhex(key.sha256),
                    key.tenant or _account(key.sha256),
                    key.tenant is not None,
                    key.max_open_requests,
                    key.requests_per_minute,
                    clock,
                )
            )
        self._is_open = not self._keys
        for plain in settings.admin_keys:
            digest = hashlib.sha256(plain.get_secret_value().encode())
            account = _account(digest.hexdigest())
            self._keys.append(KeyUse(digest.digest(), account, False, None, None, clock, is_admin=True))
        for use in self._keys:
            use.allowance, use.counted_at = use.requests_per_minute or 0, clock()

    def find(self, authorization: str) -> KeyUse | None:
        """The key of an authorization header; None where the service has no keys. Raises `Unauthenticated`."""
        return None if self._is_open else self._find(authorization)

    def check_admin(self, authorization: str) -> None:
        """Raises `Unauthenticated` for all but the key of an admin."""
        if not self._keys:
            raise Unauthenticated("an admin's key is needed, and this service was started without one (--admin-key)")
        if not self._find(authorization).is_admin:
            raise Unauthenticated("an admin's key is needed")

    def _find(self, authorization: str) -> KeyUse:
        kind, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [use for use in self._keys if hmac.compare_digest(digest, use.digest)]
        if kind.lower() != "bearer" or not matches:
            raise Unauthenticated("a valid API key is needed: Authorization: Bearer <key>")
        return matches[0]


def _account(hexdigest: str) -> str:
    """The tenant of a key that has none: a name that tells the key to nobody."""
    return f"key-{hexdigest[:12]}"
