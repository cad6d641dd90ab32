"""Adapters of a running engine: loaded and unloaded between steps, under requests, in a fixed number of slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import InvalidAdapter, UnknownModel
from planner.request import Adapter
from tests.engine_bench import Bench, holding, running
from tests.fake_slots import FakeSlots, save_fake_adapter
from tests.fakes import FakeExecutor, expected_tokens, fake_request
from tests.recorder import Recorder

WITHIN_S = 20


def load(bench: Bench, folder: Path, name: str, revision: int) -> Adapter:
    return bench.engine.load_adapter(name, save_fake_adapter(folder / f"{name}-{revision}", revision)).result(WITHIN_S)


def slots(bench: Bench) -> FakeSlots:
    assert bench.executor.adapters is not None
    return bench.executor.adapters


def test_rows_of_many_adapters_and_of_none_run_together(tmp_path: Path) -> None:
    with running(FakeExecutor(num_slots=4)) as bench:
        adapters = [None, *(load(bench, tmp_path, f"a{revision}", revision) for revision in (5, 6, 7, 2**64 - 1))]
        requests = [fake_request(range(1, 90), 9, adapter=adapters[key % 5]) for key in range(20)]
        for key, request in enumerate(requests):
            bench.client.submit(key, request)
        bench.heard.wait_ended(*range(20))
        for key, request in enumerate(requests):
            assert bench.heard.tokens[key, 0] == expected_tokens(request)


def test_a_request_for_an_adapter_that_is_not_loaded_is_refused(tmp_path: Path) -> None:
    with running(FakeExecutor(num_slots=1)) as bench:
        known = load(bench, tmp_path, "pirate", 5)
        bench.client.submit(1, fake_request(adapter=known._replace(revision=6)))
        bench.heard.wait(lambda: 1 in bench.heard.refusals)
        assert isinstance(bench.heard.refusals[1][0], UnknownModel)


def test_an_adapter_that_is_unloaded_lets_its_requests_end_and_then_frees_its_slot(tmp_path: Path) -> None:
    executor = holding()
    executor.give_slots(1)
    with running(executor) as bench:
        pirate = load(bench, tmp_path, "pirate", 5)
        request = fake_request(max_tokens=6, adapter=pirate)
        bench.client.submit(1, request)
        executor.release(2)
        bench.heard.wait(lambda: len(bench.heard.tokens.get((1, 0), ())) == 2)
        leaving = bench.engine.unload_adapter("pirate")
        loading = bench.engine.load_adapter("poet", save_fake_adapter(tmp_path / "poet", 9))
        executor.release(1)
        assert leaving.result(WITHIN_S) == pirate
        bench.client.submit(2, request)
        with pytest.raises(InvalidAdapter, match=r"all 1 slots .* are taken, 1 of them by adapters that are to go"):
            loading.result(WITHIN_S)
        assert slots(bench).held == {0: pirate}
        executor.release()
        bench.heard.wait_ended(1)
        bench.heard.wait(lambda: 2 in bench.heard.refusals)
        assert bench.heard.tokens[1, 0] == expected_tokens(request)
        assert load(bench, tmp_path, "poet", 9) == Adapter("poet", 9)
        assert slots(bench).held == {0: Adapter("poet", 9)}


def test_what_was_to_go_and_comes_back_the_same_stays_where_it_is(tmp_path: Path) -> None:
    executor = holding()
    executor.give_slots(1)
    with running(executor) as bench:
        pirate = load(bench, tmp_path, "pirate", 5)
        bench.client.submit(1, fake_request(adapter=pirate))
        executor.release(1)
        bench.heard.wait(lambda: bool(bench.heard.tokens.get((1, 0))))
        bench.engine.unload_adapter("pirate")
        again = bench.engine.load_adapter("pirate", tmp_path / "pirate-5")
        executor.release()
        assert again.result(WITHIN_S) == pirate
        bench.heard.wait_ended(1)
        assert slots(bench).held == {0: pirate}


def test_one_name_is_one_adapter(tmp_path: Path) -> None:
    with running(FakeExecutor(num_slots=2)) as bench:
        assert load(bench, tmp_path, "pirate", 5) == load(bench, tmp_path, "pirate", 5)
        with pytest.raises(InvalidAdapter, match="'pirate' is loaded already, with other matrices"):
            load(bench, tmp_path, "pirate", 6)
        assert len(slots(bench).held) == 1


def test_what_cannot_be_read_or_was_never_there_changes_nothing(tmp_path: Path) -> None:
    with running(FakeExecutor(num_slots=2)) as bench:
        with pytest.raises(InvalidAdapter):
            bench.engine.load_adapter("pirate", tmp_path / "nowhere")
        with pytest.raises(UnknownModel):
            bench.engine.unload_adapter("pirate").result(WITHIN_S)
        assert slots(bench).held == {}


def test_an_engine_without_slots_says_so(tmp_path: Path) -> None:
    with running() as bench, pytest.raises(InvalidAdapter, match="without enable_lora"):
        bench.engine.load_adapter("pirate", save_fake_adapter(tmp_path, 5))


def test_clients_hear_which_adapters_there_are_at_first_and_when_that_changes(tmp_path: Path) -> None:
    with running(FakeExecutor(num_slots=2)) as bench:
        pirate = load(bench, tmp_path, "pirate", 5)
        late = Recorder()
        client = bench.engine.connect(late)
        late.wait(lambda: bool(late.reports))
        assert late.reports[0].adapters == (pirate,)
        client.submit(1, fake_request())
        late.wait_ended(1)
        assert [report.adapters for report in late.reports[1:]] == [None] * (len(late.reports) - 1)
        bench.engine.unload_adapter("pirate").result(WITHIN_S)
        late.wait(lambda: late.reports[-1].adapters == ())
        assert [report.adapters for report in bench.heard.reports if report.adapters is not None] == [(pirate,), ()]
