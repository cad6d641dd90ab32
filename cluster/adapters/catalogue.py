"""Which adapters the workers of one model are to have: those named at the start, and what was changed while they run.

The one owner of that list is the store that the Ray cluster keeps (`cluster.adapters.store`): it outlives every gateway
and every worker, so a worker that comes later finds what the others were told. Free of Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from planner.errors import InvalidRequest, UnknownModel

MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter's folder at every worker. `order` tells one loading from another of the same name and folder, whose
    files may have changed between the two; empty: it was named at the start."""

    name: str
    folder: str
    order: str = ""


class AdapterStore(Protocol):
    """Small texts by name, which all processes of an application share. May block; each call is atomic."""

    def read(self) -> dict[str, str]: ...

    def write(self, name: str, value: str) -> None: ...

    def erase(self, name: str) -> None: ...


class AdapterCatalogue:
    """Any process of the application may have one; all of the same store say the same. Lives on an event loop."""

    def __init__(self, named: Mapping[str, str], store: AdapterStore) -> None:
        """`named`: folders by name, those of the start."""
        self._named = dict(named)
        self._store = store

    async def wanted(self) -> dict[str, AdapterEntry]:
        """By name, in the order of names."""
        changed = await asyncio.to_thread(self._store.read)
        entries = {name: AdapterEntry(name, folder) for name, folder in self._named.items()}
        for name, value in changed.items():
            told = json.loads(value)
            if told is None:
                entries.pop(name, None)
            else:
                entries[name] = AdapterEntry(name, told["folder"], told["order"])
        return dict(sorted(entries.items()))

    async def add(self, name: str, folder: str) -> AdapterEntry:
        """Want one more. Raises `InvalidRequest` where the name is taken."""
        if name in await self.wanted():
            raise InvalidRequest(f"an adapter {name!r} is loaded already; unload it first", param="lora_name")
        entry = AdapterEntry(name, folder, secrets.token_hex(8))
        value = json.dumps({"folder": folder, "order": entry.order})
        await asyncio.to_thread(self._store.write, name, value)
        return entry

    async def remove(self, name: str) -> None:
        """Want it no more. Raises `UnknownModel` where it is not wanted."""
        if name not in await self.wanted():
            raise UnknownModel(f"no adapter {name!r} is loaded", param="lora_name")
        if name in self._named:
            await asyncio.to_thread(self._store.write, name, json.dumps(None))
        else:
            await asyncio.to_thread(self._store.erase, name)


def confined(path: str, allowed: str) -> str:
    """The folder that a client may mean by `path`, which is taken from the folder `allowed` where it is relative.

    Raises `InvalidRequest` for one that does not lie in it; links are followed to see that, on the host that
    asks, and not in what is returned: on another host they may lead elsewhere. Looks at files.
    """
    folder = Path(allowed) if "\0" in path else Path(os.path.normpath(Path(allowed) / path))
    try:
        root, leads_to = Path(allowed).resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # a link that leads to itself is a RuntimeError
        raise InvalidRequest(f"lora_path is {path!r}, and cannot be followed: {error}", param="lora_path") from error
    if leads_to == root or not leads_to.is_relative_to(root):
        raise InvalidRequest(
            f"lora_path is {path!r}, and adapters are loaded from below {allowed} alone", param="lora_path"
        )
    return str(folder)
