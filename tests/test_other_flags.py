"""What `raycomb serve` says to flags of other servers, and to misspelt ones."""

from __future__ import annotations

import re

import pytest

from cluster.cli import main, serve_parser
from cluster.commands.other_flags import ELSEWHERE

OURS = frozenset(serve_parser()._option_string_actions)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is not supported: a model has one GPU, and --num-wo"),
        (["--tensor-parallel-size=2"], "--tensor-parallel-size is not supported"),
        (["--tensor_parallel_size", "2"], "--tensor-parallel-size is not supported"),
        (["-tp", "2"], "-tp is not supported"),
        (["--enforce-eager"], "--enforce-eager is here --no-cuda-graph ("),
        (["--model", "a"], "--model is here the first word: `raycomb serve MODEL`"),
        (["--mem-fraction-static", "0.8"], "--mem-fraction-static is here --gpu-memory-utilization"),
        (["--num-worker", "2"], "did you mean --num-workers?"),
        (["--seed", "1", "--gpu-memory-utilisation", "0.8"], "did you mean --gpu-memory-utilization?"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_what_to_use_instead(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "m", *words])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("raycomb serve: error: unrecognised arguments: --") or words[0] == "-tp"
    assert told in line


def test_what_resembles_no_flag_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--xyzzy", "3"])
    assert capsys.readouterr().err == (
        "raycomb serve: error: unrecognised arguments: --xyzzy 3 (raycomb serve --help tells more)\n"
    )


def test_the_table_names_no_flag_of_ours_and_advises_none_that_there_is_not() -> None:
    assert not ELSEWHERE.keys() & OURS
    advised = {flag for told in ELSEWHERE.values() for flag in re.findall(r"--[a-z][a-z-]+", told)}
    assert advised <= OURS
