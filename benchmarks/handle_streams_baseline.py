"""The usual way to stream tokens through Ray Serve, as the other side of `against_handle_streams`.

One `DeploymentHandle` stream for each request from the front to the worker, one message a token, and a Starlette
response that writes one event a token. The worker makes a token for every running request each step and does nothing
else; there is no tokenizer. So whatever time it takes is the plumbing's.

    python -m benchmarks.handle_streams_baseline --port 8000 --step-ms 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MOST_REQUESTS = 1024
NAME = "baseline"
CPUS = 0.1  # of each actor: everything has to fit on two cores


class Worker:
    """Ends a step every `step_s` seconds; each step gives each running request one token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step_ended = asyncio.Event()
        self._steps = asyncio.get_running_loop().create_task(self._run_steps())

    async def _run_steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            ended, self._step_ended = self._step_ended, asyncio.Event()
            ended.set()

    async def generate(self, num_tokens: int) -> AsyncIterator[int]:
        for token in range(num_tokens):
            await self._step_ended.wait()
            yield token


class Front:
    """Speaks just enough of `/v1/completions` for the load generator."""

    def __init__(self, worker: DeploymentHandle[Worker]) -> None:
        self._worker = worker.options(method_name="generate", stream=True)

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(self._events(len(body["prompt"]), body["max_tokens"]), media_type="text/event-stream")

    async def _events(self, num_prompt: int, num_tokens: int) -> AsyncIterator[bytes]:
        tokens = self._worker.remote(num_tokens)
        assert isinstance(tokens, DeploymentResponseGenerator)
        async for token in tokens:
            choice = {"index": 0, "text": f" {token}", "logprobs": None, "finish_reason": None}
            yield _event({"object": "text_completion", "choices": [choice]})
        yield _event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}})
        yield b"data: [DONE]\n\n"

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": True})


def _event(message: object) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


class Ingress:
    """Its argument is bound so that Serve deploys the worker together with the ingress; `front_app` does the work."""

    def __init__(self, worker: DeploymentHandle[Worker]) -> None:
        self.worker = worker


def front_app() -> Starlette:
    """Made by Serve inside the ingress replica."""
    front = Front(serve.get_deployment_handle("Worker", app_name=NAME))
    routes = [Route("/v1/completions", front.completions, methods=["POST"]), Route("/ready", front.ready)]
    return Starlette(routes=routes)


def build(step_s: float) -> serve.Application:
    """The application: one front, one worker."""
    deployment = serve.deployment(max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": CPUS})
    return deployment(serve.ingress(front_app)(Ingress)).bind(deployment(Worker).bind(step_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--step-ms", type=float, default=5.0)
    args = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(build(args.step_ms / 1e3), name=NAME, blocking=False)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has installed its own
        signal.signal(number, lambda *_: ended.set())
    print("ready", flush=True)
    ended.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    main()
