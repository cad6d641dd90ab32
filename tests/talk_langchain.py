"""A conversation by LangChain: `python talk_langchain.py BASE_URL`. Prints one JSON object of what it heard.

Stands alone, for an interpreter that has LangChain; the project needs none.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

PARAMETERS: dict[str, Any] = {
    "title": "place",
    "description": "d",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def talk(base_url: str) -> dict[str, Any]:
    langchain: Any = importlib.import_module("langchain_openai")
    messages: Any = importlib.import_module("langchain_core.messages")
    chat = langchain.ChatOpenAI(base_url=base_url, api_key="k", model="tiny", max_retries=0)
    heard: dict[str, Any] = {"whole": chat.invoke("hello").content}
    heard["streamed"] = "".join(chunk.content for chunk in chat.stream("hello"))

    tool = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
    with_tools = chat.bind_tools([tool])
    history = [messages.HumanMessage("weather?")]
    first = with_tools.invoke(history)
    (call,) = first.tool_calls
    heard["call"] = [first.response_metadata["finish_reason"], call["name"], call["args"]]
    history += [first, messages.ToolMessage("rain", tool_call_id=call["id"])]
    heard["answer"] = with_tools.invoke(history).content
    whole: Any = None
    for chunk in with_tools.stream(history[:1]):
        whole = chunk if whole is None else whole + chunk
    heard["call_streamed"] = json.dumps(whole.tool_calls[0]["args"])

    heard["structured"] = chat.with_structured_output(PARAMETERS, method="json_schema").invoke("hello")
    heard["errors"] = []
    for changes in ({"temperature": -1}, {"model": "other"}):
        made = langchain.ChatOpenAI(
            **{"base_url": base_url, "api_key": "k", "model": "tiny", "max_retries": 0} | changes
        )
        try:
            made.invoke("hello")
        except Exception as error:  # noqa: BLE001 - what it raises is the question
            heard["errors"].append([getattr(error, "status_code", None), getattr(error, "param", None)])
    return heard


if __name__ == "__main__":
    sys.stdout.write(json.dumps(talk(sys.argv[1])) + "\n")
