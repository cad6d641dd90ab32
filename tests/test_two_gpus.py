"""The benchmark of two GPUs, as far as a CPU can tell: its arithmetic, its ways for cells, and (slow) a dry run."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cell_ways import PIECE_CELLS, SharedHostMemory
from benchmarks.cell_worker import CellWorker, ForTokens
from benchmarks.random_model import write_model
from benchmarks.two_gpus import misses, timed_part
from benchmarks.two_gpus_losses import Stream, struck_figures
from benchmarks.two_gpus_mixed import (
    busier_share,
    by_second,
    load_figures,
    prompts_of,
    tokens_per_step_second,
    totals_in,
    where_the_time_goes,
)
from benchmarks.two_gpus_plan import PLANS, Part, Scale
from benchmarks.two_gpus_prefixes import RoundRobin, best_cached_share
from benchmarks.two_gpus_prefixes import prompts_of as prefix_prompts
from benchmarks.virtual_fleet import limits_of, worker_info
from cluster.bench.latency import LoadResult, RequestRecord
from cluster.language.text import load_text
from planner.request import Request
from worker.cell_image import CellLayout
from worker.config import EngineConfig
from worker.kv_pool import KvPool
from worker.pool_port import TorchMover

DRY = PLANS[Scale.DRY]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("tiny", tmp_path_factory.mktemp("models"))


def test_every_id_of_a_random_model_has_a_spelling_of_its_own(tiny_folder: Path) -> None:
    text = load_text(tiny_folder)
    assert text.vocab_size == 4000
    assert len({text.tokens.of(token) for token in range(4000)}) == 4000
    assert text.decode(text.encode("any text")) == "any text"


def test_two_workers_are_asked_for_the_same_lengths_twice_and_for_other_tokens() -> None:
    one, two = prompts_of(DRY, 1), prompts_of(DRY, 2)
    assert len(two) == 2 * len(one)
    for place, alone in enumerate(one):
        pair = two[2 * place : 2 * place + 2]
        assert [(len(p.prompt), p.output_len) for p in pair] == [(len(alone.prompt), alone.output_len)] * 2
        assert pair[0].prompt != pair[1].prompt


def record(sent: float, *events: float, tokens: int) -> RequestRecord:
    return RequestRecord(sent, events[-1], 3, tokens, events)


def test_tokens_are_counted_in_the_second_in_which_they_came() -> None:
    records = [record(10.0, 10.5, 11.5, tokens=2), record(10.0, 12.1, tokens=4)]
    assert by_second(LoadResult(records, 2.1)) == [1, 1, 4]
    figures = load_figures(LoadResult(records, 2.0))
    assert figures["output_tokens_per_s"] == 3.0
    assert figures["tokens_per_event"] == 2.0
    assert figures["last_first_token_s"] == pytest.approx(2.1)


def test_totals_of_workers_are_read_from_their_metrics() -> None:
    page = """# TYPE raycomb_sampled_tokens counter
raycomb_sampled_tokens_total{worker="a"} 7.0
raycomb_sampled_tokens_total{worker="b"} 5.0
# TYPE raycomb_step_time_seconds histogram
raycomb_step_time_seconds_bucket{worker="a",kind="decode",le="+Inf"} 3.0
raycomb_step_time_seconds_count{worker="a",kind="decode"} 3.0
raycomb_step_time_seconds_sum{worker="a",kind="decode"} 0.5
"""
    assert totals_in(page) == {
        "a": {"sampled_tokens": 7.0, "decode_steps": 3.0, "decode_step_seconds": 0.5},
        "b": {"sampled_tokens": 5.0},
    }


def test_an_uneven_split_is_told_from_workers_that_slow_each_other() -> None:
    even = [{"sampled_tokens": 50.0, "decode_step_seconds": 1.0, "decode_steps": 9.0}] * 2
    uneven = [even[0] | {"sampled_tokens": 60.0, "mixed_step_seconds": 0.2}, even[0] | {"sampled_tokens": 40.0}]
    assert (tokens_per_step_second(even), busier_share(even)) == (50.0, 0.5)
    assert (tokens_per_step_second(uneven), busier_share(uneven)) == (45.5, 0.6)


def test_where_the_time_goes_is_told_of_each_worker_and_of_all_processes() -> None:
    busy = {"sampled_tokens": 60.0, "prefilled_tokens": 30.0, "decode_steps": 8.0, "decode_step_seconds": 0.4}
    idle = {"sampled_tokens": 40.0, "prefilled_tokens": 10.0, "mixed_steps": 2.0, "mixed_step_seconds": 0.1}
    cores = {"workers": [1.0, 0.5], "gateways": [0.6, 0.2], "haproxy": [0.1], "ray": []}
    run = {"output_tokens": 100, "duration_s": 0.5, "workers": [busy, idle], "cores": cores, "client_cores": 0.3}
    told = where_the_time_goes(run)
    assert [worker["idle_share"] for worker in told["workers"]] == [0.2, 0.8]
    assert [worker["share_of_tokens"] for worker in told["workers"]] == [0.6, 0.4]
    assert [worker["share_of_prompt_tokens"] for worker in told["workers"]] == [0.75, 0.25]
    assert [worker["share_of_sequences"] for worker in told["workers"]] == [None, None]
    assert [worker["step_ms"] for worker in told["workers"]] == [{"decode": 50.0}, {"mixed": 50.0}]
    assert told["cores"] == {"workers": 1.5, "gateways": 0.8, "haproxy": 0.1, "ray": 0, "clients": 0.3}
    assert told["busiest_gateway_cores"] == 0.6


def stream(*times: float, wanted: int = 4, tokens: int = 4, endings: tuple[str, ...] = ("length",)) -> Stream:
    return Stream(wanted, 0.0, list(times), list(range(tokens)), list(endings))


def test_recovery_is_the_longest_wait_of_those_that_ran_on_the_lost_worker() -> None:
    lost = stream(1, 2, 3.1, 6)  # its token at 3.1 was on the way when the worker died
    lost_too, spared = stream(1, 2, 4, 5), stream(1, 2, 3.1, 3.8)
    ended, late = stream(1, 1.5, 2, 2.5), stream(3.5, 4, 5, 6)
    streams = [lost, spared, lost_too, ended, late]
    figures = struck_figures(streams, streams, at=3.0, num_live=2)
    assert (figures["recovery_max_s"], figures["recovery_p50_s"]) == (2.9, 2.45)
    assert figures["others_wait_max_s"] == 1.1
    assert figures["same_tokens_as_undisturbed"] == figures["whole"] == 5


@pytest.mark.parametrize(
    "wrong",
    [stream(1, 2, tokens=3), stream(1, 2, tokens=5), stream(1, 2, endings=()), stream(1, 2, endings=("length",) * 2)],
)
def test_a_stream_that_lost_or_repeated_anything_is_not_whole(wrong: Stream) -> None:
    assert not wrong.whole
    assert struck_figures([wrong, stream(1, 2)], [wrong, stream(1, 2)], at=1.5, num_live=1)["whole"] == 1


def test_round_robin_takes_turns_whatever_is_resident() -> None:
    router = RoundRobin(max_waiting=10)
    for name in ("b", "a", "c"):
        router.join(worker_info(name, limits_of(1000)))
    request = Request(np.arange(200), 5)
    assert [router.assign(number, request) for number in range(6)] == ["a", "b", "c"] * 2


def test_the_best_share_computes_each_prefix_once() -> None:
    prompts = prefix_prompts(DRY)
    distinct = len({tuple(prompt.prompt[: DRY.prefixes.prefix_len]) for prompt in prompts})
    wanted = (24 - distinct) * 192 / (24 * 202)
    assert best_cached_share(prompts, DRY) == pytest.approx(wanted)
    assert 1 < distinct <= 4


def test_cells_go_through_shared_memory_bytewise_and_while_they_still_come(tmp_path: Path) -> None:
    num_cells = 2 * PIECE_CELLS + 100
    layout = CellLayout(3, 2, 4, "bfloat16", 2 * 3 * 2 * 4 * 2)
    pools = [KvPool(3, 2 * num_cells, 2, 4, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    for pool in pools:
        pool.keys.normal_()
        pool.values.normal_()
    rng = np.random.default_rng(0)
    source, target = (rng.permutation(2 * num_cells)[:num_cells].astype(np.int32) for _ in range(2))
    size = num_cells * layout.cell_bytes
    sender, receiver = (
        SharedHostMemory(tmp_path / "cells", size, TorchMover(pool), layout, torch.device("cpu")) for pool in pools
    )
    sender.reset()
    untouched = pools[1].keys.clone()
    with ThreadPoolExecutor(1) as other:
        received = other.submit(receiver.receive, target)
        sender.send(source)
        received.result(20)
    assert torch.equal(pools[1].keys[:, target], pools[0].keys[:, source])
    assert torch.equal(pools[1].values[:, target], pools[0].values[:, source])
    untouched[:, target] = pools[0].keys[:, source]
    assert torch.equal(pools[1].keys, untouched)


def test_an_answer_goes_on_at_another_worker_and_not_with_cells_full_of_zeros(tiny_folder: Path) -> None:
    config = EngineConfig(
        model=str(tiny_folder), device="cpu", dtype="float32", load_format="dummy", max_num_seqs=4, max_cells=1024,
        max_model_len=256, num_threads=1,
    )  # fmt: skip
    first, second = CellWorker(config, 0), CellWorker(config, 1)
    prompts = list(np.random.default_rng(1).integers(300, 4000, (2, 90)))
    first.begin(prompts, 40, 8)
    held = first.so_far()
    second.receive_bytes(ForTokens(held[0][0]), first.send_bytes(0))
    second.claim_zeroed(held[1][0])
    right = first.finish()
    answers = second.go_on(prompts, [said for _, said in held], 40)
    assert second.found_cached() == sum(len(tokens) for tokens, _ in held)
    assert answers[0] == right[0]
    assert answers[1] != right[1]


GOOD: dict[str, dict[str, Any]] = {
    Part.MIXED: {"ratio": 1.97},
    Part.LOSSES: {"killed": {"streams": 4, "whole": 4}, "took_s": 3.0},
    Part.EXACT: {"kill": {"differing": []}, "took_s": 3.0},
    Part.CELLS: {"small-float32": {"same_tokens": {"peer": True, "zeroed": False}}, "took_s": 1.0},
}


@pytest.mark.parametrize(
    ("part", "bad"),
    [
        (Part.MIXED, {"ratio": 1.9}),
        (Part.MIXED, {"fault": "not done in 5 s: nothing was said"}),
        (Part.LOSSES, {"killed": {"streams": 4, "whole": 3}}),
        (Part.EXACT, {"kill": {"differing": ["tokens"]}}),
        (Part.CELLS, {"small-float32": {"same_tokens": {"peer": False, "zeroed": False}}}),
        (Part.CELLS, {"small-float32": {"same_tokens": {"peer": True, "zeroed": True}}}),
    ],
)
def test_each_bar_that_is_missed_is_told(part: Part, bad: dict[str, Any]) -> None:
    assert misses(GOOD) == []
    assert len(misses(GOOD | {part: bad})) == 1


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", Part)
def test_every_part_runs_dry_on_two_cpu_workers(part: Part, tmp_path: Path) -> None:
    figures = timed_part(part, Scale.DRY, tmp_path)
    assert figures == json.loads((tmp_path / f"{part}.json").read_text()) | {"took_s": figures["took_s"]}
    assert "fault" not in figures, figures["fault"]
    assert [missed for missed in misses({part: figures}) if "times the tokens" not in missed] == []
