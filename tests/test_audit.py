"""`.ci/audit` tells a clean set from a faulty one, and both from data that it could not reach."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FINDS = 'echo "Found 1 known vulnerability"; echo "$name 2.4.1 PYSEC-2019-217"; exit 1'


@pytest.mark.parametrize(
    ("of_known_bad", "of_ours", "code", "words"),
    [
        ("name=jinja2; " + FINDS, "exit 0", 0, "no known fault"),
        ("name=jinja2; " + FINDS, "name=ray; " + FINDS, 1, "ray 2.4.1"),
        ("echo unreachable >&2; exit 1", "exit 0", 3, "cannot be reached"),
        ("echo jinja2: not found on PyPI and could not be audited", "exit 0", 3, "cannot be reached"),
    ],
    ids=["clean", "faulty", "no network", "looked up nothing"],
)
def test_what_was_found_is_told_by_the_exit_code(
    tmp_path: Path, of_known_bad: str, of_ours: str, code: int, words: str
) -> None:
    auditor = tmp_path / "pip-audit"
    auditor.write_text(f'#!/bin/sh\ncase "$*" in *deploy/constraints.txt) {of_ours} ;; *) {of_known_bad} ;; esac\n')
    auditor.chmod(0o755)
    environment = os.environ | {"PIP_AUDIT": str(auditor)}
    done = subprocess.run([ROOT / ".ci" / "audit"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stdout + done.stderr


def test_every_pinned_version_is_one_that_an_audit_can_look_up() -> None:
    pins = [line for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert all(line.count("==") == 1 for line in pins)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in pins]
    assert len(names) == len(set(names))
