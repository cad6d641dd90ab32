"""Hears from Serve whether this replica is among those that get requests.

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
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import ReplicaContext


def follow_listing(replica: ReplicaContext, listener: Callable[[bool], None]) -> Callable[[], None]:
    """Call `listener` on the running loop: True once the replica is listed, False when it no longer is, and so on.

    Nothing is told before the replica was listed for the first time. Gives the way to end that.
    """
    was_listed = False

    def hear(targets: DeploymentTargetInfo) -> None:
        nonlocal was_listed
        is_listed = replica.replica_id in {each.replica_id for each in targets.running_replicas}
        if is_listed != was_listed:
            was_listed = is_listed
            listener(is_listed)

    controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    client = LongPollClient(
        controller,
        {(LongPollNamespace.DEPLOYMENT_TARGETS, replica.replica_id.deployment_id): hear},  # type: ignore[dict-item]
        call_in_event_loop=asyncio.get_running_loop(),
        client_id=f"listing of {replica.replica_tag}",
    )
    return client.stop
