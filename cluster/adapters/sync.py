"""Has every worker follow the catalogue of adapters, over Serve's control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray.exceptions import RayActorError, RayError

from cluster.telemetry.roll_call import Broadcast
from planner.errors import Unavailable

LOADED_WITHIN_S: Final = 60.0


async def sync_workers(broadcast: Callable[[], Broadcast]) -> list[Mapping[str, str]]:
    """What each worker could not load. One that is gone has nothing to say, and its successor looks for itself.

    Raises `Unavailable` where one does not say in time, or fails.
    """
    try:
        asked = broadcast()
        answers: list[Any] = await asyncio.to_thread(asked.results, timeout_s=LOADED_WITHIN_S, return_exceptions=True)
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"not every worker said what it has loaded: {type(error).__name__}") from error
    told = []
    for answer in answers:
        if isinstance(answer, RayActorError):
            continue
        if isinstance(answer, BaseException):
            raise Unavailable(f"not every worker said what it has loaded: {type(answer).__name__}") from answer
        told.append(answer)
    return told
