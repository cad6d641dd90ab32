"""Adapters without workers: a catalogue in this process's memory, and a fleet that has what the catalogue wants."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from cluster.adapters.catalogue import AdapterCatalogue
from cluster.adapters.desk import AdapterDesk
from planner.errors import Unavailable
from planner.request import Adapter
from tests.fake_fleet import FakeFleet


class MemoryStore:
    """An `AdapterStore`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, str] = {}

    def read(self) -> dict[str, str]:
        with self._lock:
            return dict(self._values)

    def write(self, name: str, value: str) -> None:
        with self._lock:
            self._values[name] = value

    def erase(self, name: str) -> None:
        with self._lock:
            self._values.pop(name, None)


class AdaptedFleet:
    """Two workers, of which the first cannot load what is in `failures`."""

    def __init__(self, fleet: FakeFleet, named: Mapping[str, str]) -> None:
        self.catalogue = AdapterCatalogue(named, MemoryStore())
        self.failures: dict[str, str] = {}
        self.is_reachable = True
        self.fleet = fleet

    async def sync(self) -> list[Mapping[str, str]]:
        if not self.is_reachable:
            raise Unavailable("not every worker said what it has loaded")
        wanted = await self.catalogue.wanted()
        self.fleet.adapters = {name: Adapter(name, 1) for name in wanted if name not in self.failures}
        return [{wanted[name].order: why for name, why in self.failures.items() if name in wanted}, {}]

    def desk(self, allowed: str, model_names: Collection[str]) -> AdapterDesk:
        return AdapterDesk(self.fleet, self.catalogue, self.sync, allowed, model_names, seen_within_s=0.5)
