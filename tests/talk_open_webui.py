"""Open WebUI in front of a server: `python talk_open_webui.py FOLDER BASE_URL`. Prints one JSON object of what it
heard.

Stands alone, for an interpreter that has open-webui; the project needs none. Its server keeps what it writes in FOLDER,
knows one user, and looks for nothing on the network.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 200
SETTINGS = {
    "WEBUI_AUTH": "False", "ENABLE_OLLAMA_API": "False", "RAG_EMBEDDING_ENGINE": "openai", "HF_HUB_OFFLINE": "1",
    "ENABLE_VERSION_UPDATE_CHECK": "False", "OFFLINE_MODE": "True", "WEBUI_SECRET_KEY": "of this talk",
    "OPENAI_API_KEYS": "k", "ANONYMIZED_TELEMETRY": "False", "DO_NOT_TRACK": "True",
}  # fmt: skip


@contextmanager
def served(folder: Path, base_url: str) -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    environment = os.environ | SETTINGS | {"DATA_DIR": str(folder), "OPENAI_API_BASE_URLS": base_url}
    program = [sys.executable, "-c", "from open_webui import app; app()"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*program, "serve", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def talk(folder: Path, base_url: str) -> dict[str, Any]:
    httpx: Any = importlib.import_module("httpx")
    with served(folder, base_url) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        began = time.monotonic()
        while True:
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError((folder / "log").read_text()[-3000:])
            time.sleep(0.5)
        user = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
        http.headers["Authorization"] = f"Bearer {user['token']}"
        verified = http.post("/openai/verify", json={"url": base_url, "key": "k"})
        heard: dict[str, Any] = {"verify": [model["id"] for model in verified.json()["data"]]}
        heard["models"] = [model["id"] for model in http.get("/api/models").json()["data"]]
        hello: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        whole = http.post("/api/chat/completions", json={**hello, "stream": False})
        heard["chat"] = whole.json()["choices"][0]["message"]["content"]
        with http.stream("POST", "/api/chat/completions", json={**hello, "stream": True}) as answer:
            heard["streamed"] = "".join(deltas(answer.iter_lines()))
        endless = {"model": "tiny", "messages": [{"role": "user", "content": "endless"}], "stream": True}
        with http.stream("POST", "/api/chat/completions", json=endless) as answer:
            heard["stopped"] = next(deltas(answer.iter_lines()))
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello there."}]
        titled = http.post("/api/v1/tasks/title/completions", json={"model": "tiny", "messages": turns})
        heard["title"] = titled.json()["choices"][0]["message"]["content"]
    return heard


def deltas(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(talk(Path(sys.argv[1]), sys.argv[2])) + "\n")
