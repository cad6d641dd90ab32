"""A recorded step log, lived again offline, gives the same steps; what is no record is said to be none."""

from __future__ import annotations

import json
import random
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from planner.errors import InvalidConfiguration, InvalidStepLog
from planner.replay import ReplayedStep, replay
from planner.request import SamplingParams
from tests.engine_bench import Bench
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from tests.recorder import Recorder
from worker.engine import Engine
from worker.step_log import StepLog

ROOT = Path(__file__).parent.parent


def recorded(path: Path, depth: int = 1, **limits: Any) -> Path:
    """The log of an engine that ran a crowd: shared prefixes, forks, cancels, a failed forward, tight cells."""
    chance = random.Random(5)
    executor = FakeExecutor(fake_info(num_cells=160), max_steps_in_flight=depth)
    if depth == 1:  # behind a forward that failed, the fake's pool takes a step in flight for a wrong one
        executor.fail_forward(4)
    wanted = fake_limits(executor.info, max_steps_in_flight=depth, max_num_seqs=6, **limits)
    engine = Engine(executor, wanted, inbox_size=1000, on_death=lambda error: None, check_cells=True, step_log=path)
    engine.start()
    heard = Recorder()
    bench = Bench(engine, executor, heard, engine.connect(heard), [])
    for key in range(30):
        prompt = list(range(chance.choice((1, 20)), chance.randint(30, 60)))
        sampling = SamplingParams(seed=key, logit_bias=((3, 1.5),), presence_penalty=chance.choice((0.0, 0.5)))
        bench.client.submit(key, fake_request(prompt, chance.randint(1, 30), n=chance.randint(1, 2), sampling=sampling))
        if chance.random() < 0.3:
            bench.client.cancel(chance.randrange(key + 1))
    heard.wait_ended(*range(30))
    heard.wait_quiet()
    engine.stop()
    assert not heard.refusals
    return path


def steps_of(path: Path) -> list[ReplayedStep]:
    with path.open() as lines:
        return list(replay(lines))


def test_a_log_has_every_step_as_soon_as_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    executor = FakeExecutor(fake_info(num_cells=160))
    limits = fake_limits(executor.info)
    engine = Engine(executor, limits, inbox_size=10, on_death=lambda error: None, check_cells=True, step_log=path)
    engine.start()
    heard = Recorder()
    client = engine.connect(heard)
    client.submit(0, fake_request(list(range(8)), 3))
    heard.wait_ended(0)
    deadline = time.monotonic() + 5
    steps: list[ReplayedStep] = []
    while len(steps) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
        steps = steps_of(path) if path.stat().st_size else []
    engine.stop()
    assert len(steps) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_life_lived_again_plans_every_step_as_it_was(tmp_path: Path, depth: int) -> None:
    path = recorded(tmp_path / "deeper" / "steps.jsonl", depth)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = [line["plan"] for line in lines if line.get("plan") is not None]
    steps = steps_of(path)
    assert [step.account.number for step in steps] == numbers
    assert len(steps) > 30
    assert all(step.as_recorded for step in steps)
    assert all(step.at is not None for step in steps)
    assert {"cancel", "submit", "plan", "commit"} <= {key for line in lines for key in line}


def test_a_log_that_was_cut_off_is_replayed_up_to_there(tmp_path: Path) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    whole = steps_of(path)
    path.write_bytes(path.read_bytes()[:-200])
    assert 0 < len(steps_of(path)) <= len(whole)


def test_a_log_with_other_steps_says_which_are_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"plan":3' in line)
    changed = json.loads(lines[at])
    changed["slices"][0][1] += 1
    lines[at] = json.dumps(changed) + "\n"
    path.write_text("".join(lines))
    assert [step.account.number for step in steps_of(path) if not step.as_recorded] == [3]
    assert main(["explain", str(path), "--step", "3"]) == 1
    assert "OTHERWISE than recorded" in capsys.readouterr().out


def broken(lines: list[str]) -> Iterable[tuple[str, list[str]]]:
    yield "line 1", ["not json\n"]
    yield "no step log", ['{"format": "other"}\n']
    yield "line 1", ['{"format": "raycomb-steps/1"}\n']
    yield "line 2: nothing is known of a line with surprise", [lines[0], '{"surprise": 1}\n']
    yield "not the oldest in flight", [lines[0], '{"commit": 9, "outcomes": []}\n']
    yield "the record has step 1 where the planner has None", [lines[0], '{"plan": 1, "chunks": [], "slices": []}\n']
    yield "capacity", [lines[0].replace('"capacity":160', '"capacity":0')]


def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "steps.jsonl").read_text().splitlines(keepends=True)
    for message, wrong in broken(lines):
        with pytest.raises(InvalidStepLog, match=message):
            list(replay(wrong))


def test_the_command_explains_the_last_steps_in_words_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    assert main(["explain", str(path), "--last", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("\nstep ") + told.startswith("step ") == 2
    assert "decodes: one token a step" in told
    assert told.endswith("2 steps replayed, 0 of them otherwise than recorded\n")
    assert main(["explain", str(path), "--step", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["account"]["number"] == 1
    assert first["account"]["chunks"][0]["why"].startswith("prefills")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "it has no whole line"),
        (b'{"format": "raycomb-st', "it has no whole line"),
        (b"\xff\xfe\n", "is no step log: it is not text in UTF-8"),
        (b"hello\n", "line 1 is not JSON: Expecting value at column 1"),
        (b"[1]\n", "line 1: this is no step log of the format raycomb-steps/1"),
        (b'{"format": "raycomb-steps/1"}\n', "line 1 has no 'limits'"),
        (b'{"format": "raycomb-steps/1", "limits": 5}\n', "line 1: "),
    ],
)
def test_a_file_that_is_no_log_is_one_line_that_names_it(
    content: bytes | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "its.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["explain", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"raycomb: error: {path}")
    assert told in line


@pytest.mark.parametrize(
    ("words", "told"), [(["--step", "100000"], "has no step 100000"), (["--last", "0"], "--last must be at least 1")]
)
def test_steps_that_there_are_not_are_not_explained(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    assert main(["explain", str(path), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_fault(tmp_path: Path) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    command = f"{shlex.quote(sys.executable)} -m cluster.cli explain {shlex.quote(str(path))}; echo $? >&2"
    told = subprocess.run(
        ["sh", "-c", f"({command}) | head -n 1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("step ")
    assert told.stderr == "141\n"


def values_in(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in an object of JSON, itself included; of lists to the first one alone."""
    yield where
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from values_in(each, (*where, key))


def with_one_changed(line: str, where: tuple[Any, ...], to: Any) -> str:
    root = {"line": json.loads(line)}
    at: Any = root
    way = ("line", *where)
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = to
    return json.dumps(root["line"]) + "\n"


def test_a_record_with_any_field_of_a_wrong_kind_is_refused_or_lived_and_nothing_else(tmp_path: Path) -> None:
    with recorded(tmp_path / "steps.jsonl").open() as lines:
        log = list(islice(lines, 60))
    kinds = {next(key for key in json.loads(line) if key != "at"): number for number, line in enumerate(log)}
    assert kinds.keys() >= {"format", "submit", "plan", "commit"}
    for number in kinds.values():
        for where in values_in(json.loads(log[number])):
            for to in (None, "x", -1, 10**30, [[]]):
                changed = [*log[:number], with_one_changed(log[number], where, to), *log[number + 1 :]]
                try:
                    list(replay(changed))
                except InvalidStepLog:
                    continue


def test_a_log_is_its_owners_alone_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, max_bytes=200)
    for number in range(100):
        log.write({"plan": number})
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert 200 <= path.stat().st_size < 300
    assert [json.loads(line)["plan"] for line in path.read_text().splitlines()] == list(
        range(path.read_text().count("\n"))
    )


def test_a_log_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfiguration, match="cannot be written"):
        StepLog(tmp_path / "file" / "steps.jsonl")
