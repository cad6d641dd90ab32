"""Which adapters a worker has, and who still runs with them. Free of torch: their matrices are the executor's business.

There is a fixed number of slots. An adapter takes one when it is loaded; once it is to go it gets no new requests, and
its slot is free when the last of those that run has ended.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from planner.errors import InvalidAdapter, UnknownModel
from planner.request import Adapter, Request


class AdapterMatrices(Protocol):
    """An adapter as it was read. `revision`: 64 bits of a hash of all that it consists of."""

    @property
    def revision(self) -> int: ...


class AdapterSlots(Protocol):
    """Where an executor keeps the matrices of adapters."""

    @property
    def num_slots(self) -> int: ...

    def read(self, folder: Path) -> AdapterMatrices:
        """On any thread; takes as long as reading files does. Raises `InvalidAdapter` with what does not fit."""
        ...

    def put(self, slot: int, adapter: Adapter, matrices: AdapterMatrices) -> None:
        """Have chunks of `adapter` computed with these. On the engine's thread, with no step in flight."""
        ...

    def drop(self, adapter: Adapter) -> None:
        """No chunk comes with it any more; its slot may be filled anew. Called as `put` is."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """What the engine's thread is asked to do: load `matrices` under `name`, or, without them, unload that name.

    `done` gets the adapter, or an `InvalidAdapter` or `UnknownModel`; nothing has changed then.
    """

    name: str
    matrices: AdapterMatrices | None
    done: Future[Adapter] = field(default_factory=Future)


@dataclass(slots=True)
class _Place:
    """One slot's adapter, and the requests that ran with it when it was last looked."""

    slot: int
    adapter: Adapter
    running: set[int] = field(default_factory=set)
    leaving: bool = False


class AdapterShelf:
    """Owner: the engine's loop, on its thread. `adapters`, those that take requests, in the order in which they came,
    may be read on any thread: it is replaced whole."""

    def __init__(self, slots: AdapterSlots | None, live: Collection[int]) -> None:
        """`slots`: None where the executor has none. `live`: ids of the planner's requests that have not ended."""
        self._slots = slots
        self._live = live
        self._places: list[_Place] = []
        self.adapters: tuple[Adapter, ...] = ()

    def check(self, request: Request) -> None:
        """Raises `UnknownModel` for a request whose adapter is not here, or is to go."""
        if request.adapter is not None and self._place(request.adapter) is None:
            raise UnknownModel(f"the adapter {request.adapter.name!r} is not loaded here", param="model")

    def note(self, request_id: int, request: Request) -> None:
        """The planner took a request that was checked."""
        if request.adapter is not None and (place := self._place(request.adapter)) is not None:
            place.running.add(request_id)

    def carry_out(self, order: AdapterOrder) -> None:
        """Do what is asked, and say so; with no step in flight. Nothing where whoever asked has gone meanwhile."""
        if not order.done.set_running_or_notify_cancel():
            return
        try:
            adapter = self._unload(order.name) if order.matrices is None else self._load(order.name, order.matrices)
        except (InvalidAdapter, UnknownModel) as refusal:
            order.done.set_exception(refusal)
        else:
            self.adapters = tuple(place.adapter for place in self._places if not place.leaving)
            order.done.set_result(adapter)

    def sweep(self) -> None:
        """Free the slots of those that are to go and that nobody runs with any more; with no step in flight."""
        for place in [place for place in self._places if place.leaving]:
            place.running.intersection_update(self._live)
            if not place.running:
                self._places.remove(place)
                self._slots_or_fail().drop(place.adapter)

    def _load(self, name: str, matrices: AdapterMatrices) -> Adapter:
        slots, adapter = self._slots_or_fail(), Adapter(name, matrices.revision)
        if (place := next((each for each in self._places if each.adapter == adapter), None)) is not None:
            place.leaving = False
            return adapter
        if name in {each.name for each in self.adapters}:
            raise InvalidAdapter(f"an adapter {name!r} is loaded already, with other matrices", param="lora_name")
        self.sweep()
        free = sorted(set(range(slots.num_slots)) - {each.slot for each in self._places})
        if not free:
            num_leaving = len(self._places) - len(self.adapters)
            raise InvalidAdapter(
                f"all {slots.num_slots} slots for adapters (max_loras) are taken, {num_leaving} of them by adapters "
                "that are to go and still run",
                param="lora_name",
            )
        slots.put(free[0], adapter, matrices)
        self._places.append(_Place(free[0], adapter))
        return adapter

    def _unload(self, name: str) -> Adapter:
        place = next((each for each in self._places if each.adapter.name == name and not each.leaving), None)
        if place is None:
            raise UnknownModel(f"no adapter {name!r} is loaded here", param="lora_name")
        place.leaving = True
        self.sweep()
        return place.adapter

    def _place(self, adapter: Adapter) -> _Place | None:
        return next((each for each in self._places if each.adapter == adapter and not each.leaving), None)

    def _slots_or_fail(self) -> AdapterSlots:
        if self._slots is None:
            raise InvalidAdapter("this worker was started without enable_lora", param="enable_lora")
        return self._slots
