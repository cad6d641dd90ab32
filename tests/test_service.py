"""The real service as somebody meets it who has just read the README: its commands, its first words, its end."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf import json_format

from protos import inference_pb2, inference_pb2_grpc
from tests.service_process import ServiceProcess
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(290)]

README = Path(__file__).parent.parent / "README.md"
DOCUMENTED_URL = "http://127.0.0.1:8000"


def blocks_of_readme(language: str, containing: str) -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    found = [block for block in blocks if containing in block]
    assert found, f"the README has no {language} block with {containing}"
    return found


def shell(script: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_of_the_readme_streams_an_answer(smollm2_service: ServiceProcess, api_key: str) -> None:
    for block in blocks_of_readme("console", "curl -N"):
        script = block.replace(DOCUMENTED_URL, smollm2_service.url)
        told = shell(script.replace("curl ", f'curl --noproxy "*" -sS -H "authorization: Bearer {api_key}" ', 1))
        assert told.startswith("data: {")
        assert told.endswith("data: [DONE]\n\n")
        assert "Paris" in told


def test_the_grpcurl_of_the_readme_is_a_call_that_is_answered(smollm2_service: ServiceProcess, api_key: str) -> None:
    (block,) = blocks_of_readme("console", "grpcurl")
    parts = shlex.split(block)
    body, method = parts[parts.index("-d") + 1], parts[-1]
    assert method == "raycomb.v1.Inference/Generate"
    with grpc.insecure_channel(f"127.0.0.1:{smollm2_service.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = json_format.Parse(body, inference_pb2.GenerateRequest())
        messages = list(stub.Generate(request, metadata=(("authorization", f"Bearer {api_key}"),), timeout=60))
    assert sum(len(piece.text) for message in messages for piece in message.choices) > 0


def test_the_python_of_the_readme_gets_an_answer(smollm2_service: ServiceProcess, api_key: str) -> None:
    (block,) = blocks_of_readme("python", "OpenAI(")
    program = block.replace(DOCUMENTED_URL, smollm2_service.url).replace("unused", api_key)
    program += "\nassert answer.choices[0].text and answer.usage.completion_tokens == 8\n"
    environment = os.environ | {"NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_command_that_the_service_prints_works_as_printed(smollm2_service: ServiceProcess, api_key: str) -> None:
    (printed,) = re.findall(r"^  (curl .*\n.*)$", "".join(smollm2_service.output), re.MULTILINE)
    answer = shell(f"{printed} -sS --noproxy '*'", KEY=api_key)
    assert '"role":"assistant"' in answer
    assert '"finish_reason":"' in answer


async def test_the_first_words_come_long_before_the_last(smollm2_service: ServiceProcess, api_key: str) -> None:
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 24, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {api_key}", "x-request-id": "mine-1"}
    asked_at = time.monotonic()
    async with (
        httpx.AsyncClient(base_url=smollm2_service.url, timeout=120, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.headers.get_list("x-request-id") == ["mine-1"]
        assert response.headers["cache-control"] == "no-cache"
        arrivals = [time.monotonic() async for _ in events_of(response)]
    assert len(arrivals) > 5, "words come as they are made"
    assert arrivals[-1] - arrivals[0] > (arrivals[-1] - asked_at) / 4, "and are not kept back"


async def test_only_the_doors_that_need_no_key_open_without_one(smollm2_service: ServiceProcess) -> None:
    async with httpx.AsyncClient(base_url=smollm2_service.url, timeout=60, trust_env=False) as client:
        for path in ("/health", "/ready", "/version"):
            assert (await client.get(path)).status_code == 200
        for path in (
            "/v1/models",
            "/v1/models/smollm2-135m",
            "//v1/models",
            "/v1/../v1/models",
            "/health/../v1/models",
        ):
            assert (await client.get(path)).status_code == 401, path
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
