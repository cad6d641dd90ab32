"""Asks a service over HTTP for one token, as a client would, and says what went wrong. Blocks."""

from __future__ import annotations

import http.client
import json
import urllib.error
from typing import Any, Final

from cluster.commands.service_client import opened

PATIENCE_S: Final = 60.0


def why_no_token(url: str, api_key: str | None = None) -> str | None:
    """None: a token came from the first model that the service at `url` lists."""
    try:
        model = _call(f"{url}/v1/models", api_key)["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
        num_tokens = _call(f"{url}/v1/completions", api_key, body)["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return f"it answers {error.code}: {error.read(500).decode(errors='replace').strip()}"
    except (OSError, http.client.HTTPException) as error:
        return f"it gives no answer: {error}"
    except (ValueError, LookupError, TypeError):
        return "its answer is not that of such a service"
    return None if num_tokens == 1 else f"it tells of {num_tokens} tokens where it was asked for one"


def _call(url: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    with opened(url, patience_s=PATIENCE_S, api_key=api_key, body=body) as answer:
        return json.loads(answer.read())
