"""Requests that schemathesis makes out of docs/openapi.json, against the application with a scripted fleet.

Judged: no 5xx, no request without an answer, and of each endpoint documented statuses only. Sessions, files and batches
are kept as in a service; workers are scripted, so that time goes into requests.

    python -m benchmarks.openapi_cases --seconds 200
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.record import record
from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.batches.api import Batches
from cluster.batches.desk import BatchDesk
from cluster.batches.runner import BatchRunner
from cluster.models import single
from cluster.web.api import create_app
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports_of
from tests.http_desk import MODEL, TEXT, says
from tests.listening import listening

ROOT: Final = Path(__file__).parent.parent
CHECKS: Final = "not_a_server_error,status_code_conformance,content_type_conformance"
REQUEST_TIMEOUT_S: Final = 30


@asynccontextmanager
async def application(folder: Path) -> AsyncIterator[str]:
    """At a port of this machine; gives its address."""
    fleet = FakeFleet(
        replace(MODEL, context=4096, capacity=8192), says("hi there", "hello you"), reports=reports_of(num_seqs=8)
    )
    models = single(Service(fleet, TEXT, ApiSettings(batch_store=str(folder)), model_name="tiny"))
    desk = BatchDesk(folder)
    runner = BatchRunner(models, desk)
    runner.start()
    try:
        async with listening(create_app(models, Batches(desk, runner))) as url:
            yield url
    finally:
        await runner.close()
        await desk.close()
        await models.first.shut()


async def cases(url: str, seconds: int, max_examples: int, seed: int) -> tuple[int | None, str]:
    """The exit code of schemathesis, and what it says."""
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"),
        *(str(ROOT / "docs" / "openapi.json"), "--url", url, "--checks", CHECKS, "--max-time", str(seconds)),
        *("--max-examples", str(max_examples), "--seed", str(seed), "--no-color", "--continue-on-failure"),
        *("--request-timeout", str(REQUEST_TIMEOUT_S), "--generation-database", "none", "--no-shrink"),
        *("--warnings", "off", "--suppress-health-check", "all", "-H", "x-request-timeout-ms: 20000"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tempfile.gettempdir()
    )
    output = (await process.communicate())[0].decode()
    return process.returncode, output


def figures_of(exit_code: int | None, output: str) -> dict[str, Any]:
    found = re.search(r"(\d[\d,]*) generated", output)
    num_cases = int(found[1].replace(",", "")) if found else 0
    return {"exit_code": exit_code, "num_cases": num_cases, "output": output if exit_code else ""}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with application(Path(folder)) as url:
            exit_code, output = await cases(url.rstrip("/"), args.seconds, args.max_examples, args.seed)
    print(output)
    return figures_of(exit_code, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=200)
    parser.add_argument("--max-examples", type=int, default=400, help="of each endpoint and phase")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    met = figures["exit_code"] == 0 and figures["num_cases"] > 0
    record("openapi_cases", vars(args) | {"checks": CHECKS}, figures | {"met": met}, keep=not args.trial)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
