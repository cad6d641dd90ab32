"""Keeps one worker's adapters as the catalogue wants them, whenever that changes and from the start."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

from cluster.adapters.catalogue import AdapterCatalogue, AdapterEntry, confined
from planner.errors import InvalidAdapter, InvalidRequest, Unavailable, UnknownModel
from planner.request import Adapter

LOOK_S: Final = 2.0
"""The catalogue is looked at so often; a gateway that changed it says so beside."""
RETRY_S: Final = 30.0
"""What could not be loaded is tried again so often: its files may come later on this host."""

logger = logging.getLogger("ray.serve")


class AdapterEngine(Protocol):
    """What is used of `worker.engine.Engine`."""

    def load_adapter(self, name: str, folder: Path) -> Future[Adapter]: ...

    def unload_adapter(self, name: str) -> Future[Adapter]: ...


class AdapterKeeper:
    """Owner: the worker's event loop."""

    def __init__(
        self, engine: AdapterEngine, catalogue: AdapterCatalogue, allowed: str | None, look_s: float = LOOK_S
    ) -> None:
        """`allowed`: the folder below which clients may load adapters; None: they may not."""
        self._engine = engine
        self._catalogue = catalogue
        self._allowed = allowed
        self._look_s = look_s
        self._loaded: dict[str, AdapterEntry] = {}
        self._failed: dict[AdapterEntry, tuple[float, str]] = {}  # when, and why
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Load everything. Raises `InvalidAdapter` for what was named at the start and cannot be loaded."""
        for entry, why in (await self._follow()).items():
            if not entry.order:
                raise InvalidAdapter(f"the adapter {entry.name!r} at {entry.folder}: {why}", param="lora_modules")
            logger.warning("the adapter %r is not loaded: %s", entry.name, why)

    async def sync(self) -> dict[str, str]:
        """Be as the catalogue wants it now; by `AdapterEntry.order`, why what is wanted could not be loaded."""
        return {entry.order: why for entry, why in (await self._follow()).items()}

    def start(self) -> None:
        """Follow the catalogue from now on, until `close`."""
        self._task = asyncio.create_task(self._run(), name="follow the catalogue of adapters")
        self._task.add_done_callback(_tell_fault)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self._follow()
            except Unavailable as error:
                logger.warning("the adapters were not looked after: %s", error.message)

    async def _follow(self) -> dict[AdapterEntry, str]:
        async with self._turn:
            wanted = await self._catalogue.wanted()
            for name in [name for name, entry in self._loaded.items() if wanted.get(name) != entry]:
                await self._unload(name)
            now = asyncio.get_running_loop().time()
            self._failed = {entry: when_why for entry, when_why in self._failed.items() if entry in wanted.values()}
            for entry in wanted.values():
                if entry.name not in self._loaded and self._is_due(entry, now):
                    await self._load(entry, now)
            return {entry: why for entry, (_, why) in self._failed.items()}

    def _is_due(self, entry: AdapterEntry, now: float) -> bool:
        return entry not in self._failed or now - self._failed[entry][0] >= RETRY_S

    async def _load(self, entry: AdapterEntry, now: float) -> None:
        try:
            await asyncio.wrap_future(await asyncio.to_thread(self._read, entry))
        except (InvalidAdapter, InvalidRequest) as error:
            self._failed[entry] = (now, error.message)
        else:
            self._failed.pop(entry, None)
            self._loaded[entry.name] = entry

    def _read(self, entry: AdapterEntry) -> Future[Adapter]:
        """Not on the event loop."""
        return self._engine.load_adapter(entry.name, self._folder_of(entry))

    def _folder_of(self, entry: AdapterEntry) -> Path:
        """What clients asked for is checked once more where the files are: a link may lead anywhere."""
        if not entry.order:
            return Path(entry.folder)
        if self._allowed is None:
            raise InvalidRequest("this worker loads no adapters for clients", param="lora_path")
        return Path(confined(entry.folder, self._allowed))

    async def _unload(self, name: str) -> None:
        try:
            await asyncio.wrap_future(self._engine.unload_adapter(name))
        except UnknownModel:
            logger.warning("the adapter %r was gone already", name)
        del self._loaded[name]


def _tell_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        logger.error("the adapters are looked after no more, by a fault of ours", exc_info=fault)
