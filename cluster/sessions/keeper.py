"""The owner of a fleet's sessions as a Serve deployment of one replica.

Serve places, checks and replaces it, and tells gateways where it listens; what they ask goes over gRPC, as tokens do
(`cluster.sessions.server`). Sessions live in its memory: when it ends, all of them are unknown from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr
from ray import serve

from cluster.serving.node_address import node_address
from cluster.sessions.histories import SessionLimits, Sessions
from cluster.sessions.server import SessionServer
from worker.heap import settle
from worker.tls import server_credentials


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """`secret` and `tls` (a folder, or None) are those of the data plane, and so is `host`; None: the node's own."""

    limits: SessionLimits
    secret: SecretStr
    host: str | None
    tls: str | None


class SessionKeeper:
    """Serve owns it and calls every method on one event loop."""

    async def __init__(self, settings: KeeperSettings) -> None:  # type: ignore[misc]
        self._server = SessionServer(
            Sessions(settings.limits),
            settings.secret.get_secret_value(),
            settings.host or node_address(),
            None if settings.tls is None else server_credentials(Path(settings.tls)),
        )
        self.address = await self._server.start()
        settle()

    def record_replica_metadata(self) -> dict[str, str]:
        """What gateways learn of this replica from Serve, once; see `cluster.routing.membership_router`."""
        return {"worker_id": serve.get_replica_context().replica_tag, "address": self.address}

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if hasattr(self, "address"):
            await self._server.stop()
