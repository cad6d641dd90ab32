"""The service behind Serve's proxy in Python while one of its workers is scaled away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service_process import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

START_S = 180.0


def test_a_worker_that_is_scaled_away_finishes_what_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.scaled_service", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends == {"running": ["length"] * 6, "later": ["length"] * 10}
