"""Has every worker follow the catalogue of adapters, over Serve's control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from ray.exceptions import RayError

from cluster.roll_call import Broadcast
from planner.errors import Unavailable

LOADED_WITHIN_S: Final = 60.0


async def sync_workers(broadcast: Callable[[], Broadcast]) -> list[Mapping[str, str]]:
    """What each worker could not load. Raises `Unavailable` where one does not say in time."""
    asked = broadcast()
    try:
        told: list[Mapping[str, str]] = await asyncio.to_thread(
            asked.results, timeout_s=LOADED_WITHIN_S, return_exceptions=False
        )
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"not every worker said what it has loaded: {type(error).__name__}") from error
    return told
