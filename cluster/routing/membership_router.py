"""Hears from Serve which workers run, and tells the process's membership board.

Serve gives a deployment's request router, in every process that holds a handle to it, the set of running replicas with
what each recorded in `record_replica_metadata`. It pickles a router class by value, so the class would see copies of
its module's globals; therefore it imports `cluster.routing.membership` when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class MembershipRouter(RequestRouter):
    """Passes the membership on, and routes the few calls that go through handles to any replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve on its router's thread, at once and at each change."""
        super().update_replicas(replicas)
        from cluster.routing.membership import board, board_key, members_of

        key = board_key(self.app_name, self._deployment_id.name)
        board().publish(key, members_of(replica.replica_metadata for replica in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
