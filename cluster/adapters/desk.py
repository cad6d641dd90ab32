"""Has the workers of one model load and unload adapters, for an operator who asks a gateway. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from cluster.adapters.catalogue import MAX_NAME, AdapterCatalogue, confined
from cluster.routing.fleet import Fleet
from planner.errors import InvalidRequest, Unavailable

SEEN_WITHIN_S: Final = 10.0
"""What workers have done is on its way to this gateway for less than that."""
LOOK_S: Final = 0.01

SyncWorkers = Callable[[], Awaitable[Sequence[Mapping[str, str]]]]
"""Has every worker follow the catalogue; what each could not load (`AdapterKeeper.sync`). Raises `Unavailable`."""


class AdapterDesk:
    """Owner: a gateway's event loop. Several gateways may have one each; the catalogue is what they agree by."""

    def __init__(
        self,
        fleet: Fleet,
        catalogue: AdapterCatalogue,
        sync_workers: SyncWorkers,
        allowed: str,
        model_names: Collection[str],
        seen_within_s: float = SEEN_WITHIN_S,
    ) -> None:
        """`allowed`: the folder below which adapters may be loaded; `model_names`: what no adapter may be called."""
        self._fleet = fleet
        self._catalogue = catalogue
        self._sync_workers = sync_workers
        self._allowed = allowed
        self._model_names = frozenset(model_names)
        self._seen_within_s = seen_within_s

    async def load(self, name: str, path: str) -> None:
        """Have every worker load it, these and those that come later.

        Raises `InvalidRequest` with the first worker's reason, or `Unavailable`; no worker has it then.
        """
        check_name(name)
        if name in self._model_names:
            raise InvalidRequest(f"{name!r} is the name of a model", param="lora_name")
        folder = await asyncio.to_thread(confined, path, self._allowed)
        if not self._fleet.ready:
            raise Unavailable("no worker can load an adapter now")
        entry = await self._catalogue.add(name, folder)
        try:
            told = await self._sync_workers()
        except BaseException:  # also where the client left: what it did not wait for shall not be there
            await asyncio.shield(self._catalogue.remove(name))
            raise
        if failures := [of_worker[entry.order] for of_worker in told if entry.order in of_worker]:
            await self._catalogue.remove(name)
            await self._sync_workers()
            raise InvalidRequest(f"the adapter {name!r} cannot be loaded: {failures[0]}", param="lora_path")
        await self._until(lambda: self._fleet.num_without(name) == 0)

    async def unload(self, name: str) -> None:
        """New requests for it are refused from now on, and those that run end as they would. Raises `UnknownModel`, and
        `Unavailable` where a worker does not let go of it yet; it will."""
        await self._catalogue.remove(name)
        with suppress(Unavailable):  # workers look by themselves, only later
            await self._sync_workers()
        if not await self._until(lambda: name not in self._fleet.adapters):
            raise Unavailable(f"the adapter {name!r} is to go, and not every worker has let go of it yet")

    async def _until(self, seen: Callable[[], bool]) -> bool:
        """Whether it was seen in time. A worker that is just starting tells of it when it comes."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._seen_within_s
        while not seen() and loop.time() < ends_at:  # noqa: ASYNC110 - workers' news come on this loop, to the router
            await asyncio.sleep(LOOK_S)
        return seen()


def check_name(name: str) -> None:
    """Raises `InvalidRequest` for what is no name of an adapter."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise InvalidRequest(f"lora_name must be 1 to {MAX_NAME} printable characters", param="lora_name")
