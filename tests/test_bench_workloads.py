"""The loads of `raycomb bench online`: seeded, of the shapes that they claim, and refused in words if need be."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter
from pathlib import Path

import pytest

from cluster.bench import online as bench_online
from cluster.bench.latency import LoadResult, RequestRecord, result_block
from cluster.bench.workloads import LONGEST, OnlineWorkload, arrivals, chat, parse_slo, read_trace, shared_prefix
from planner.errors import InvalidConfiguration


def gaps(burstiness: float) -> list[float]:
    times = list(arrivals(8000, 20.0, burstiness, seed=1))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_burstiness_changes_how_even_gaps_are_and_not_their_mean(burstiness: float) -> None:
    mean, deviation = statistics.mean(gaps(burstiness)), statistics.stdev(gaps(burstiness))
    assert mean == pytest.approx(0.05, rel=0.08)
    assert deviation / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_chats_have_a_long_tail_and_the_same_seed_the_same_chats() -> None:
    prompts = chat(2000, vocab_size=32_000, seed=5)
    assert prompts == chat(2000, vocab_size=32_000, seed=5) != chat(2000, vocab_size=32_000, seed=6)
    lengths = [prompt.num_input for prompt in prompts]
    assert 40 < statistics.median(lengths) < 75 < statistics.mean(lengths) < 250
    assert 500 < max(lengths) <= LONGEST
    assert 120 < statistics.median(prompt.output_len for prompt in prompts) < 180
    assert all(1000 <= token < 32_000 for prompt in prompts for token in prompt.prompt)  # type: ignore[operator]


def test_prefixes_are_shared_by_zipfs_law_and_the_rest_is_not() -> None:
    prompts = shared_prefix(3000, num_prefixes=10, prefix_len=64, input_len=8, output_len=4, vocab_size=32_000, seed=2)
    counts = Counter(tuple(prompt.prompt[:64]) for prompt in prompts).most_common()
    assert len(counts) == 10
    assert counts[0][1] / counts[1][1] == pytest.approx(2.0, rel=0.2)
    assert len({tuple(prompt.prompt[64:]) for prompt in prompts}) == 3000
    assert {prompt.num_input for prompt in prompts} == {72}


def test_a_trace_says_what_is_sent_and_when(tmp_path: Path) -> None:
    lines = [
        {"at": 7.5, "prompt": "hello", "output_len": 3},
        {"at": 7.5, "prompt_token_ids": [5, 6], "output_len": 4},
        {"at": 9.0, "input_len": 12, "output_len": 5},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts, times = read_trace(tmp_path / "trace.jsonl", vocab_size=32_000, seed=0)
    assert times == [0.0, 0.0, 1.5]
    assert [prompt.output_len for prompt in prompts] == [3, 4, 5]
    assert (prompts[0].prompt, prompts[1].prompt, prompts[2].num_input) == ("hello", [5, 6], 12)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "[]",
        '{"at": 1}',
        '{"at": 1, "output_len": 2}',
        '{"at": "x", "output_len": 2, "input_len": 1}',
        '{"at": 0.5, "output_len": 2, "input_len": 1}',
    ],
)
def test_a_line_that_is_none_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "trace.jsonl").write_text('{"at": 1, "output_len": 2, "input_len": 3}\n' + line)
    with pytest.raises(InvalidConfiguration, match=r"trace\.jsonl:2"):
        read_trace(tmp_path / "trace.jsonl", vocab_size=32_000, seed=0)


def record(ttft: float, tpot: float, num_output: int = 11) -> RequestRecord:
    first = 10.0 + ttft
    last = first + tpot * (num_output - 1)
    return RequestRecord(10.0, last, 5, num_output, (first, last) if num_output > 1 else (first,))


def test_goodput_counts_those_within_every_limit() -> None:
    records = [record(0.1, 0.01), record(0.3, 0.01), record(0.1, 0.05), record(0.1, 9.0, num_output=1)]
    result = LoadResult([*records, RequestRecord(0, 1, 5, error="x")], duration_s=2.0)
    assert result.summary(parse_slo(["ttft:200", "tpot:20"]))["request_goodput"] == 1.0
    assert result.summary(parse_slo(["e2el:201"]))["request_goodput"] == 1.0
    assert "request_goodput" not in result.summary()
    assert "Request goodput (req/s):                1.00" in result_block(result, {"ttft": 200.0, "tpot": 20.0})
    assert "goodput" not in result_block(result)


@pytest.mark.parametrize("part", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "ttft:-1", "ttft:nan"])
def test_a_limit_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(InvalidConfiguration) as told:
        parse_slo([part])
    assert told.value.param == "goodput"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_online.add_arguments(parser)
    return parser.parse_args(["--model", "m", *words])


def test_flags_choose_the_load() -> None:
    prompts, times = bench_online.chosen_load(
        arguments("--workload", "shared-prefix", "--num-prompts", "5", "--prefix-len", "7", "--input-len", "3")
    )
    assert times is None
    assert [prompt.num_input for prompt in prompts] == [10] * 5
    assert len(bench_online.chosen_load(arguments("--workload", "chat", "--num-prompts", "4"))[0]) == 4
    assert arguments().workload is OnlineWorkload.RANDOM


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (("--workload", "chat", "--input-len", "5"), "--input-len means nothing to --workload chat"),
        (("--workload", "chat", "--output-len", "5"), "--output-len means nothing to --workload chat"),
        (("--num-prefixes", "5"), "--num-prefixes means nothing to --workload random"),
        (("--workload", "trace", "--trace", __file__, "--request-rate", "5"), "--request-rate means nothing to"),
        (("--workload", "trace", "--trace", __file__, "--num-prompts", "5"), "--num-prompts means nothing to"),
        (("--prompts", __file__, "--num-prompts", "5"), "--num-prompts means nothing to --prompts FILE"),
        (("--prompts", __file__, "--workload", "chat"), "--workload means nothing to --prompts FILE"),
    ],
)
def test_a_flag_that_the_load_would_not_read_is_refused(words: tuple[str, ...], unread: str) -> None:
    with pytest.raises(InvalidConfiguration, match=unread):
        bench_online.chosen_load(arguments(*words))


@pytest.mark.parametrize("words", [("--workload", "trace"), ("--trace", __file__)])
def test_a_trace_and_its_file_go_together(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfiguration, match="go together"):
        bench_online.chosen_load(arguments(*words))
