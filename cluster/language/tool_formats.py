"""How models write calls of tools, told by their chat templates, and the grammars that make them write one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from cluster.answers.structured import ONE_LINE
from protos.openai_tools import EMPTY_SCHEMA, Tool


class ToolFormat(Enum):
    """* HERMES (also Qwen): `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, one after the other.
    * LLAMA3_JSON: the whole answer is `{"name": ..., "parameters": {...}}`, more of them after `; `.
    * MISTRAL: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.
    * MISTRAL_ARGS: `[TOOL_CALLS]name[ARGS]{...}`, one after the other.
    """

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"


MARKS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
"""Tokens that a reader of answers must see even where a tokenizer calls them special."""


def tool_format(template: str) -> ToolFormat | None:
    """How a model with this chat template writes calls; None where it is not one of the known ways."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return ToolFormat.LLAMA3_JSON
    return None


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    marks: Mapping[str, int],
    *,
    many: bool,
    or_json: Mapping[str, Any] | None = None,
) -> str:
    """A grammar of answers that call one of these tools, or several of them where `many`; with `or_json` also of those
    that are JSON of that schema. `marks` has the ids of special tokens by their spelling."""
    rules = {f"a{i}": f"%json {_schema(tool.function.parameters or EMPTY_SCHEMA)}" for i, tool in enumerate(tools)}
    call, between, before, after = _shape(form, marks)
    for i, tool in enumerate(tools):
        rules[f"f{i}"] = call.format(name=_quoted(tool.function.name), inner=tool.function.name, a=f"a{i}")
    rules["call"] = " | ".join(f"f{i}" for i in range(len(tools)))
    rules["calls"] = " ".join([before, "call", f"({between} call)*" if many else "", after])
    if or_json is not None:
        rules["plain"] = f"%json {_schema(or_json)}"
    start = "start: calls" + ("" if or_json is None else " | plain")
    return "\n".join(["%llguidance {}", start, *(f"{name}: {rule}" for name, rule in rules.items())])


def _shape(form: ToolFormat, marks: Mapping[str, int]) -> tuple[str, str, str, str]:
    """One call (with places for its name and its arguments), and what stands between, before and after calls."""

    def mark(spelling: str) -> str:
        return f"<[{marks[spelling]}]>" if spelling in marks else _quoted(spelling)

    as_object = '"{{\\"name\\": \\"{inner}\\", \\"%s\\": " {a} "}}"'
    match form:
        case ToolFormat.HERMES:
            opening, closing = mark("<tool_call>"), mark("</tool_call>")
            return f'{opening} "\\n" {as_object % "arguments"} "\\n" {closing}', '"\\n"', "", ""
        case ToolFormat.LLAMA3_JSON:
            return as_object % "parameters", '"; "', "", ""
        case ToolFormat.MISTRAL:
            return as_object % "arguments", '", "', f'{mark("[TOOL_CALLS]")} "["', '"]"'
        case ToolFormat.MISTRAL_ARGS:
            return f"{mark('[TOOL_CALLS]')} {{name}} {mark('[ARGS]')} {{a}}", "", "", ""


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": ONE_LINE}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
