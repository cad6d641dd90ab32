"""A gateway's way to the keeper of the sessions, wherever Serve has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cluster.routing.membership import Members, board_key, follow_members
from cluster.sessions.remote import RemoteOwner

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class KeeperLink:
    """Owner: the gateway, on its event loop. No question passes through `keeper`, the handle to the deployment: holding
    it makes Serve tell this process where the keeper is."""

    def __init__(self, keeper: DeploymentHandle[Any], secret: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.owner = RemoteOwner(secret, credentials)
        self._keeper = keeper
        self._unsubscribe = follow_members(board_key(keeper.app_name, keeper.deployment_name), self._set_members)

    def open(self) -> None:
        """Start the handle's router, and with it the membership's flow."""
        self._keeper = self._keeper.options()

    async def close(self) -> None:
        self._unsubscribe()
        await self.owner.shut()

    def _set_members(self, members: Members) -> None:
        """While one is replaced there may be none, or both: then the one that is known stays."""
        addresses = [member.address for member in members.values()]
        if self.owner.address not in addresses:
            self.owner.set_address(next(iter(addresses), None))
