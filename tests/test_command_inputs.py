"""Whatever a command is told wrongly is answered with one line and exit code 2, and never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.cli import main
from planner.errors import InvalidConfiguration
from worker.kv_pool import KvPool, bytes_per_cell


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["top", "--url", "nonsense"], "a service's URL looks like http://host:port, not 'nonsense'"),
        (["top", "--url", "http://a:b"], "a service's URL looks like http://host:port"),
        (["top", "--url", "http://127.0.0.1:1", "--once"], "http://127.0.0.1:1 does not answer: Connection refused"),
        (["top", "--interval", "-1"], "-1 is no number of seconds"),
        (["doctor", "--url", "nonsense"], "a service's URL looks like"),
        (["doctor", "--wait", "long"], "long is no number of seconds"),
        (["doctor", "--cluster", "/nowhere.yaml"], "the cluster's file /nowhere.yaml cannot be read: No such file"),
        (["bench", "online", "--model", "m", "--base-url", "nonsense"], "looks like http://host:port, not 'nonsense'"),
        (["bench", "online", "--model", "m", "--result", "/nowhere/x"], "--result: there is no folder /nowhere"),
        (["bench", "online", "--model", "m", "--prompts", "/nowhere"], "--prompts: there is no file /nowhere"),
        (["bench", "offline", "m", "--result", "/tmp"], "--result: /tmp is a folder"),
        (["bench", "offline", "m", "--input-len", "0"], "--input-len: a whole number of at least 1 is wanted, not 0"),
        (["bench", "offline", "m", "--batch-sizes", "1,x"], "with commas between them, not 1,x"),
        (["bench", "offline", "m", "--workload", "x"], "--workload: 'x' is none of decode, mixed, prefill"),
        (["serve", "m", "--front", "x"], "--front: 'x' is none of auto, haproxy, python"),
        (
            ["keys", "--tenant", "a b"],
            "--tenant must be one name of at most 64 printable ASCII characters without spaces",
        ),
        (["keys", "--max-open-requests", "0"], "--max-open-requests must be greater than or equal to 1, not 0"),
        (
            ["bench", "online", "--model", "m", "--base-url", "http://127.0.0.1:1/v1"],
            "http://127.0.0.1:1 does not answer",
        ),
        (["bench", "online", "--base-url", "http://127.0.0.1:1"], "does not answer: Connection refused"),
        (["bench", "online", "--num-prompts", "0"], "--num-prompts: a whole number of at least 1 is wanted, not 0"),
        (["bench", "online", "--workload", "x"], "--workload: 'x' is none of random, chat"),
        (["bench", "online", "--request-rate", "0"], "--request-rate: a number above 0 is wanted, not 0"),
        (["bench", "online", "--burstiness", "nan"], "--burstiness: a number above 0 is wanted, not nan"),
        (["bench", "online", "--prefix-len", "5"], "--prefix-len means nothing to --workload random"),
        (["doctor", "--grpc-target", "nowhere"], "a server's place looks like host:port, not 'nowhere'"),
        (["serve", "m", "--tenant-weights", "acme=2"], "--tenant-weights: 'acme=2' is not JSON: Expecting value"),
        (["certs", "/dev/null"], "/dev/null cannot be made: File exists"),
        (["certs", "/dev/null/certs"], "/dev/null/certs cannot be made: Not a directory"),
        (["inspect", "/nowhere.pt2"], "/nowhere.pt2 cannot be read: No such file or directory"),
        (["inspect", __file__], "is not a program, or not a whole one"),
        (["serve", "m", "--drain-timeout-s", "soon"], "soon is no number of seconds"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_a_wrong_word_is_one_line_and_exit_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:  # as argparse ends
        code = int(end.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("raycomb")
    assert told in line


def test_a_pool_that_this_machine_could_never_fill_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidConfiguration, match="a pool of 1000000000000 cells takes") as told:
        KvPool(2, 10**12, 1, 8, torch.float32, torch.device("cpu"))
    assert told.value.param == "max_cells"
    assert str((10**12 + 1) * bytes_per_cell(2, 1, 8, torch.float32)) in told.value.message


def test_an_output_that_is_a_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    assert main(["run", str(tmp_path / "none"), "--prompts", str(prompts), "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"raycomb: error: the output {tmp_path} is a folder"
