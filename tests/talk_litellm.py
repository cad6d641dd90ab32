"""A conversation by LiteLLM: `python talk_litellm.py BASE_URL`. Prints one JSON object of what it heard.

Stands alone, for an interpreter that has LiteLLM; the project needs none.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def talk(base_url: str) -> dict[str, Any]:
    litellm: Any = importlib.import_module("litellm")
    reached = {"model": "openai/tiny", "api_base": base_url, "api_key": "k", "max_retries": 0}

    def ask(messages: list[Any], **changes: Any) -> Any:
        return litellm.completion(**reached | {"messages": messages} | changes)

    hello = [{"role": "user", "content": "hello"}]
    heard: dict[str, Any] = {"whole": ask(hello).choices[0].message.content}
    heard["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in ask(hello, stream=True))

    tool = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    first = ask(history, tools=[tool]).choices[0]
    (call,) = first.message.tool_calls
    heard["call"] = [first.finish_reason, call.function.name, json.loads(call.function.arguments)]
    history += [first.message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    heard["answer"] = ask(history, tools=[tool]).choices[0].message.content
    pieces = [chunk.choices[0].delta.tool_calls for chunk in ask(history[:1], tools=[tool], stream=True)]
    heard["call_streamed"] = "".join(piece[0].function.arguments for piece in pieces if piece)

    form = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PARAMETERS}}
    heard["structured"] = json.loads(ask(hello, response_format=form).choices[0].message.content)
    told = litellm.embedding(model="openai/tiny", input=["hello"], api_base=base_url, api_key="k")
    heard["vector"] = len(told.data[0]["embedding"])
    heard["errors"] = []
    for changes in ({"temperature": -1}, {"model": "openai/other"}):
        try:
            ask(hello, **changes)
        except Exception as error:  # noqa: BLE001 - what it raises is the question
            heard["errors"].append([getattr(error, "status_code", None), None])
    return heard


if __name__ == "__main__":
    sys.stdout.write(json.dumps(talk(sys.argv[1])) + "\n")
