"""Other people's clients hold a scripted conversation: whole, streamed, tools, a schema, errors.

Each runs where it is installed: OpenAI's client for Node in the folder that RAYCOMB_NODE_MODULES names, LangChain,
LiteLLM, lm-eval and Open WebUI under the interpreter that RAYCOMB_CLIENTS_PYTHON names (else this one).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.request import Request
from tests.fake_fleet import FakeFleet
from tests.grammar_rig import TEXT
from tests.service_process import tiny_checkpoint
from tests.talk_lm_eval import ASKED, SCORED
from tests.test_http_clients import served
from tests.test_tools import HERMES, ROOMY, call
from tests.tiny_text import EOS, tiny_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

HERE = Path(__file__).parent
CLIENTS = os.environ.get("RAYCOMB_CLIENTS_PYTHON")
MODULES = os.environ.get("RAYCOMB_NODE_MODULES")
CITY = {"city": "Paris"}
HEARD = {
    "whole": "Hello there.",
    "streamed": "Hello there.",
    "call": ["tool_calls", "get_weather", CITY],
    "answer": "It rains.",
    "call_streamed": '{"city": "Paris"}',
    "structured": CITY,
}


def script(request: Request, _: int) -> Sequence[int]:
    """What the model says follows from what it is shown."""
    shown = TEXT.decode(request.prompt.tolist())
    if request.sampling.grammar is not None:
        said = json.dumps(CITY)
    elif "[tool#" in shown:
        said = "It rains."
    else:
        said = call() if "get_weather|" in shown else "Hello there."
    return [*TEXT.encode(said), EOS]


async def heard(*command: str, fleet: FakeFleet | None = None) -> dict[str, Any]:
    async with served(fleet or FakeFleet(ROOMY, script), text=tiny_text(HERMES)) as url:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        process = await asyncio.create_subprocess_exec(
            *command, f"{url}/v1", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told


def python_with(package: str) -> str:
    if CLIENTS is None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return CLIENTS or sys.executable


async def test_openais_client_for_node() -> None:
    node = shutil.which("node")
    if node is None or MODULES is None:
        pytest.skip("needs node, and its client in the folder RAYCOMB_NODE_MODULES")
    told = await heard(node, str(HERE / "talk_openai.mjs"))
    expected = HEARD | {"response_events": ["response.created", "response.completed"], "vector": 4}
    assert told == expected | {"errors": [[400, "temperature"], [404, "model"]]}


async def test_langchain() -> None:
    told = await heard(python_with("langchain_openai"), str(HERE / "talk_langchain.py"))
    assert told == HEARD | {"errors": [[400, "temperature"], [404, "model"]]}


async def test_litellm() -> None:
    told = await heard(python_with("litellm"), str(HERE / "talk_litellm.py"))
    assert told == HEARD | {"vector": 4, "errors": [[400, None], [404, None]]}


async def test_lm_evaluation_harness(tmp_path: Path) -> None:
    """Likelihoods by echo, and answers up to a stop, one request at a time and four."""

    def reversed_prompt(request: Request, _: int) -> Sequence[int]:
        return [*TEXT.encode(TEXT.decode(request.prompt.tolist())[::-1] + ". And more"), EOS]

    python, folder = python_with("lm_eval"), str(tiny_checkpoint(tmp_path))
    told = await heard(python, str(HERE / "talk_lm_eval.py"), folder, fleet=FakeFleet(ROOMY, reversed_prompt))
    # Each token of a prompt scores -0.5 here, and is the best.
    likelihoods = [[-0.5 * len(TEXT.encode(continuation)), True] for _, continuation in SCORED]
    assert told["1"] == told["4"] == {"likelihoods": likelihoods, "answers": [prompt[::-1] for prompt in ASKED]}


async def test_open_webui(tmp_path: Path) -> None:
    """The check of a connection, its models, a chat, one that is stopped, and a title."""

    def until_stopped(request: Request, number: int) -> Sequence[int]:
        shown = TEXT.decode(request.prompt.tolist())
        return TEXT.encode("on " * 1000) if "endless" in shown else script(request, number)

    fleet = FakeFleet(replace(ROOMY, context=8192), until_stopped)
    told = await heard(python_with("open_webui"), str(HERE / "talk_open_webui.py"), str(tmp_path), fleet=fleet)
    said = {"chat": "Hello there.", "streamed": "Hello there.", "title": "Hello there."}
    assert told == said | {"verify": ["tiny"], "models": ["tiny"], "stopped": "o"}
    assert fleet.num_running == 0
    assert [len(generation.cancelled) for generation in fleet.generations] == [0, 0, 1, 0]
