"""A worker follows the catalogue of adapters: from its start, at once when told, and by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.adapters.catalogue import AdapterCatalogue, confined
from cluster.adapters.keeper import AdapterKeeper
from planner.errors import InvalidAdapter, InvalidRequest, Unavailable, UnknownModel
from planner.request import Adapter
from tests.adapter_rig import MemoryStore
from tests.engine_bench import running
from tests.fake_slots import save_fake_adapter
from tests.fakes import FakeExecutor
from worker.engine import Engine


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    with running(FakeExecutor(num_slots=2)) as bench:
        yield bench.engine


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    for name, revision in (("pirate", 5), ("poet", 6), ("priest", 7)):
        save_fake_adapter(tmp_path / "allowed" / name, revision)
    return tmp_path / "allowed"


async def test_adapters_named_at_the_start_and_those_of_clients_are_there_from_the_start(
    engine: Engine, allowed: Path
) -> None:
    catalogue = AdapterCatalogue({"pirate": str(allowed / "pirate")}, MemoryStore())
    await catalogue.add("poet", str(allowed / "poet"))
    await AdapterKeeper(engine, catalogue, str(allowed)).begin()
    assert engine.adapters == (Adapter("pirate", 5), Adapter("poet", 6))


async def test_a_worker_follows_what_is_added_and_removed(engine: Engine, allowed: Path) -> None:
    catalogue = AdapterCatalogue({"pirate": str(allowed / "pirate")}, MemoryStore())
    keeper = AdapterKeeper(engine, catalogue, str(allowed))
    await keeper.begin()
    await catalogue.add("poet", str(allowed / "poet"))
    await catalogue.remove("pirate")
    assert await keeper.sync() == {}
    assert engine.adapters == (Adapter("poet", 6),)


async def test_the_same_name_loaded_anew_has_its_new_files(engine: Engine, allowed: Path) -> None:
    catalogue = AdapterCatalogue({}, MemoryStore())
    keeper = AdapterKeeper(engine, catalogue, str(allowed))
    await catalogue.add("poet", str(allowed / "poet"))
    await keeper.sync()
    save_fake_adapter(allowed / "poet", 60)
    await catalogue.remove("poet")
    await catalogue.add("poet", str(allowed / "poet"))
    await keeper.sync()
    assert engine.adapters == (Adapter("poet", 60),)


async def test_what_cannot_be_loaded_is_told_under_its_order_and_the_others_are_loaded(
    engine: Engine, allowed: Path
) -> None:
    catalogue = AdapterCatalogue({}, MemoryStore())
    keeper = AdapterKeeper(engine, catalogue, str(allowed))
    missing = await catalogue.add("a ghost", str(allowed / "ghost"))
    outside = await catalogue.add("b thief", str(allowed.parent))
    for name in ("pirate", "poet"):
        await catalogue.add(name, str(allowed / name))
    full = await catalogue.add("priest", str(allowed / "priest"))
    told = await keeper.sync()
    assert set(told) == {missing.order, outside.order, full.order}
    assert "no adapter" in told[missing.order]
    assert "from below" in told[outside.order]
    assert "all 2 slots" in told[full.order]
    assert [adapter.name for adapter in engine.adapters] == ["pirate", "poet"]


class FlakyStore(MemoryStore):
    """Does not answer for so many calls."""

    num_silent = 3

    def read(self) -> dict[str, str]:
        if self.num_silent:
            self.num_silent -= 1
            raise Unavailable("the cluster's store does not answer")
        return super().read()


async def test_a_worker_looks_by_itself_and_goes_on_after_the_store_was_out_of_reach(
    engine: Engine, allowed: Path
) -> None:
    catalogue = AdapterCatalogue({"pirate": str(allowed / "pirate")}, FlakyStore())
    keeper = AdapterKeeper(engine, catalogue, str(allowed), look_s=0.01)
    keeper.start()
    try:
        async with asyncio.timeout(10):
            while engine.adapters != (Adapter("pirate", 5),):  # noqa: ASYNC110 - engines tell no loop
                await asyncio.sleep(0.01)
    finally:
        await keeper.close()


async def test_a_link_out_of_the_folder_is_not_followed(engine: Engine, allowed: Path, tmp_path: Path) -> None:
    secret = save_fake_adapter(tmp_path / "secret", 9)
    (allowed / "link").symlink_to(secret)
    with pytest.raises(InvalidRequest, match="from below"):
        confined("link", str(allowed))
    catalogue = AdapterCatalogue({}, MemoryStore())
    entry = await catalogue.add("link", str(allowed / "link"))
    assert entry.order in await AdapterKeeper(engine, catalogue, str(allowed)).sync()


async def test_a_link_that_leads_to_itself_is_told_and_the_others_are_loaded(engine: Engine, allowed: Path) -> None:
    (allowed / "loop").symlink_to(allowed / "loop")
    catalogue = AdapterCatalogue({}, MemoryStore())
    entry = await catalogue.add("a loop", str(allowed / "loop"))
    await catalogue.add("poet", str(allowed / "poet"))
    assert (await AdapterKeeper(engine, catalogue, str(allowed)).sync()).keys() == {entry.order}
    assert engine.adapters == (Adapter("poet", 6),)


async def test_a_fault_of_whoever_looks_after_the_adapters_is_told(
    engine: Engine, allowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.write("pirate", "no JSON")
    keeper = AdapterKeeper(engine, AdapterCatalogue({}, store), str(allowed), look_s=0.01)
    keeper.start()
    try:
        async with asyncio.timeout(10):
            while "a fault of ours" not in caplog.text:  # noqa: ASYNC110 - logs tell no loop
                await asyncio.sleep(0.01)
    finally:
        await keeper.close()


async def test_a_worker_does_not_start_without_what_it_was_to_have(engine: Engine, allowed: Path) -> None:
    catalogue = AdapterCatalogue({"ghost": str(allowed / "ghost")}, MemoryStore())
    with pytest.raises(InvalidAdapter, match="'ghost'"):
        await AdapterKeeper(engine, catalogue, None).begin()


async def test_a_worker_starts_without_what_only_clients_asked_for(engine: Engine, allowed: Path) -> None:
    catalogue = AdapterCatalogue({}, MemoryStore())
    await catalogue.add("ghost", str(allowed / "ghost"))
    await catalogue.add("poet", str(allowed / "poet"))
    await AdapterKeeper(engine, catalogue, str(allowed)).begin()
    assert engine.adapters == (Adapter("poet", 6),)


async def test_without_the_operators_leave_nothing_of_clients_is_loaded(engine: Engine, allowed: Path) -> None:
    catalogue = AdapterCatalogue({"pirate": str(allowed / "pirate")}, MemoryStore())
    await catalogue.add("poet", str(allowed / "poet"))
    keeper = AdapterKeeper(engine, catalogue, None)
    await keeper.begin()
    assert engine.adapters == (Adapter("pirate", 5),)


@pytest.mark.parametrize("path", ["", "..", "../other", "/etc", "a/../../b", ".", "a\0b"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        confined(path, str(tmp_path))
    assert refusal.value.param == "lora_path"


def test_a_folder_that_is_a_link_on_one_host_alone_is_the_same_path_on_all(tmp_path: Path) -> None:
    (tmp_path / "disk" / "poet").mkdir(parents=True)
    (tmp_path / "adapters").symlink_to(tmp_path / "disk")
    allowed = str(tmp_path / "adapters")
    assert confined("poet", allowed) == f"{allowed}/poet"
    assert confined(str(tmp_path / "disk" / "poet"), allowed) == str(tmp_path / "disk" / "poet")


def test_paths_inside_the_folder_are_taken_relative_or_whole(tmp_path: Path) -> None:
    inside = str((tmp_path / "a" / "b").resolve())
    assert confined("a/b", str(tmp_path)) == confined(inside, str(tmp_path)) == confined("a/./c/../b", str(tmp_path))
    assert confined("a/b", str(tmp_path)) == inside


async def test_what_the_catalogue_holds_is_the_same_for_all_of_its_store() -> None:
    store = MemoryStore()
    one, other = AdapterCatalogue({"pirate": "/p"}, store), AdapterCatalogue({"pirate": "/p"}, store)
    entry = await one.add("poet", "/poet")
    assert (await other.wanted())["poet"] == entry
    with pytest.raises(InvalidRequest, match="loaded already"):
        await other.add("poet", "/elsewhere")
    await other.remove("pirate")
    assert list(await one.wanted()) == ["poet"]
    with pytest.raises(UnknownModel):
        await one.remove("pirate")
    again = await one.add("pirate", "/q")
    assert (await other.wanted())["pirate"] == again
