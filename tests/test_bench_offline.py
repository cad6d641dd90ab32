"""The offline benchmark: an engine in this process, timed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import stepping_executor
from cluster.bench import workload
from cluster.bench.offline import OfflineBench
from cluster.commands import bench as bench_command
from cluster.commands.engine_flags import engine_config
from cluster.offline.engine import OfflineEngine, running
from planner.errors import ForwardFailed, InvalidConfiguration, NeverFits
from planner.request import SamplingParams, Update
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from worker.engine import Engine
from worker.executor import limits_for


@contextmanager
def fake_engine(executor: FakeExecutor) -> Iterator[OfflineEngine]:
    limits = fake_limits(executor.info, prefix_caching=False)
    with running(Engine(executor, limits, inbox_size=64, on_death=lambda error: None)) as engine:
        yield engine


def bench_of(engine: OfflineEngine) -> OfflineBench:
    return OfflineBench(engine, max_in_flight=64, repeats=1, seed=0)


def test_a_decode_step_takes_what_a_step_of_the_engine_takes() -> None:
    with fake_engine(FakeExecutor(step_time_s=0.01)) as engine:
        point = bench_of(engine).decode(4, input_len=8, output_len=20)
    assert (point.batch, point.context) == (4, 18)
    assert 9 < point.step_ms < 20
    assert point.tokens_per_s == pytest.approx(4e3 / point.step_ms)


def test_a_whole_load_is_generated_to_its_last_token() -> None:
    with fake_engine(FakeExecutor(fake_info(context=64))) as engine:
        point = bench_of(engine).mixed(20, (2, 30))
    items = workload.mixed(20, (2, 30), vocab_size=1000, seed=0)
    assert (point.num_prompts, point.input_tokens) == (20, workload.total_input(items))
    assert point.output_tokens == workload.total_output(items)
    assert point.output_tokens_per_s == pytest.approx(point.output_tokens / point.seconds)


def test_a_benchmark_whose_sequence_fails_or_is_refused_gives_no_figure() -> None:
    executor = FakeExecutor(fake_info(num_cells=128))
    executor.fail_forward(0)
    with fake_engine(executor) as engine:
        with pytest.raises(ForwardFailed):
            bench_of(engine).prefill(1, input_len=60)
        with pytest.raises(NeverFits):
            bench_of(engine).prefill(1, input_len=500)


def offline_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    return parser.parse_args(["offline", *words])


@pytest.mark.parametrize(
    ("words", "num_points"),
    [
        (["--batch-sizes", "1,3", "--input-len", "8", "--output-len", "4"], 2),
        (["--workload", "mixed", "--num-prompts", "5", "--length-range", "2", "9"], 1),
        (["--workload", "prefill", "--num-prompts", "3", "--input-len", "70"], 1),
    ],
)
def test_each_offline_load_gives_its_points_with_program_and_configuration(words: list[str], num_points: int) -> None:
    config = engine_config("unused", {})
    with fake_engine(FakeExecutor()) as engine:
        figures = bench_command.measure(engine, offline_args("MODEL", *words), config)
    assert len(figures["points"]) == num_points
    assert figures["program"]["vocab_size"] == 1000
    assert figures["config"]["model"] == "MODEL"
    json.dumps(figures)


def test_a_flag_that_the_load_would_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = offline_args(str(tmp_path), "--workload", "mixed", "--input-len", "8")
    with pytest.raises(InvalidConfiguration, match="--input-len means nothing to --workload mixed"):
        bench_command.offline_config(args)


def test_more_sequences_than_the_engine_runs_at_once_are_no_batch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = offline_args(str(tmp_path), "--batch-sizes", "4,5", "--max-num-seqs", "4")
    with pytest.raises(InvalidConfiguration, match="--batch-sizes has 5, and --max-num-seqs 4 lets no more"):
        bench_command.offline_config(args)


def test_the_offline_engine_has_room_for_the_widest_batch_and_no_prefix_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = bench_command.offline_config(offline_args(str(tmp_path), "--batch-sizes", "1,200", "--max-cells", "900"))
    assert (config.max_num_seqs, config.prefix_caching, config.max_cells) == (200, False, 900)
    config = bench_command.offline_config(offline_args(str(tmp_path), "--workload", "mixed", "--num-prompts", "77"))
    assert config.max_num_seqs == 77


def test_the_stepping_executor_takes_its_time_and_says_when_a_token_left() -> None:
    executor = stepping_executor.make(engine_config("unused", {"max_num_seqs": 16}))
    request = fake_request([1, 2, 3], 4, sampling=SamplingParams(logprobs=0))
    engine = Engine(executor, limits_for(engine_config("unused", {}), executor.info), inbox_size=4, on_death=print)
    start = time.perf_counter()
    with running(engine) as offline:
        updates = [news.update for news in offline.run([(0, request)], 1)]
    left_at = [score.logprob or 0.0 for update in updates if isinstance(update, Update) for score in update.logprobs]
    assert len(left_at) == 4
    assert left_at == sorted(left_at)
    assert start + 4 * stepping_executor.STEP_S <= left_at[-1] <= time.perf_counter()
