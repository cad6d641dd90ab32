"""Hears from Serve whether this replica is among those that get requests, and whether its application is to stay.

A replica that Serve takes away learns of it by its shutdown hook, and that comes after its last request has ended:
whoever watches it would wait for ever. The replicas that get requests are told to Serve's own routers by a long poll,
and here one more listens to it. That is no public interface of Ray's: it goes with the one minor version of Ray that
`pyproject.toml` allows. A router class of our own, as workers have, is refused for what HAProxy stands in front of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private.common import DeploymentID, DeploymentTargetInfo, EndpointInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import ReplicaContext


def follow_listing(
    replica: ReplicaContext, hear_listed: Callable[[bool], None], hear_deployed: Callable[[bool], None]
) -> Callable[[], None]:
    """Call the listeners on the running loop: `hear_listed` with True once the replica is listed, with False when it no
    longer is, and so on; `hear_deployed` likewise of whether its deployment has a route, which Serve takes from it when
    the application is deleted and leaves to it in every redeploy.

    Nothing is told before the first True. Gives the way to end that.
    """
    replica_id = replica.replica_id
    listed, deployed = _Changes(hear_listed), _Changes(hear_deployed)

    def hear_targets(targets: DeploymentTargetInfo) -> None:
        listed.now(replica_id in {each.replica_id for each in targets.running_replicas})

    def hear_routes(routes: dict[DeploymentID, EndpointInfo]) -> None:
        deployed.now(replica_id.deployment_id in routes)

    controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    client = LongPollClient(
        controller,
        {
            (LongPollNamespace.DEPLOYMENT_TARGETS, replica_id.deployment_id): hear_targets,  # type: ignore[dict-item]
            LongPollNamespace.ROUTE_TABLE: hear_routes,
        },
        call_in_event_loop=asyncio.get_running_loop(),
        client_id=f"listing of {replica.replica_tag}",
    )
    return client.stop


class _Changes:
    """Tells a listener of a truth that was False before anything was heard, whenever it turns."""

    def __init__(self, listener: Callable[[bool], None]) -> None:
        self._listener = listener
        self._value = False

    def now(self, value: bool) -> None:
        if value != self._value:
            self._value = value
            self._listener(value)
