"""How the answer to a conversation is to be written and read: calls of tools, thoughts, and the form it must have.

All of it follows from the request and from the model's chat template. Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.answers.structured import Form, json_form, requested_form
from cluster.language.message_reader import MessageReader, NewReader
from cluster.language.reasoning import OPENING, ReasoningReader
from cluster.language.text import TextModel
from cluster.language.tool_formats import ToolFormat, call_grammar
from cluster.language.tool_reader import ToolReader
from planner.errors import InvalidRequest
from protos.openai import ChatBody
from protos.openai_tools import EMPTY_SCHEMA

_TAIL = 8  # tokens at the end of a prompt that may spell the opening of thoughts


@dataclass(frozen=True, slots=True)
class Talk:
    """`form` is what answers must follow, and `parts` are forms that it is made of and that are checked before it.
    `new_reader`: None where answers are content and nothing else."""

    form: Form | None
    parts: tuple[Form, ...]
    new_reader: NewReader | None


def plan_talk(body: ChatBody, text: TextModel, prompt_ids: Sequence[int]) -> Talk:
    """Raises `InvalidRequest` where the model takes no tools, or two wishes contradict each other."""
    form, parts = requested_form(body), list[Form]()
    tools = body.offered_tools
    written = _format(text) if tools else None
    if written is not None and (body.must_call or form is not None):
        if body.chosen_tool is not None:
            tools = [tool for tool in tools if tool.function.name == body.chosen_tool]
        for place, tool in enumerate(body.tools):
            if tool in tools:
                schema = tool.function.parameters or EMPTY_SCHEMA
                parts.append(json_form(f"tools[{place}].function.parameters", schema))
        if form is None:
            grammar = call_grammar(written, tools, text.marks, many=body.parallel_tool_calls)
            form = Form("tools", grammar)
        elif body.must_call or form.schema is None:
            raise InvalidRequest(
                f"{form.param} and a call that tool_choice may ask for exclude each other", param=form.param
            )
        else:
            parts.append(form)
            many = body.parallel_tool_calls
            grammar = call_grammar(written, tools, text.marks, many=many, or_json=form.schema)
            form = Form(form.param, grammar)
    names = frozenset(tool.function.name for tool in tools)
    thinks = text.chat_template is not None and text.chat_template.thinks and form is None
    if not thinks and written is None:
        return Talk(form, tuple(parts), None)
    begun = thinks and text.decode(list(prompt_ids[-_TAIL:])).rstrip().endswith(OPENING)

    def new_reader() -> MessageReader:
        return MessageReader(
            ReasoningReader(begun=begun) if thinks else None,
            ToolReader(written, names) if written is not None else None,
        )

    return Talk(form, tuple(parts), new_reader)


def _format(text: TextModel) -> ToolFormat:
    template = text.chat_template
    if template is None or not template.reads_tools:
        raise InvalidRequest("the model's chat template takes no tools", param="tools")
    if template.tool_format is None:
        raise InvalidRequest("how this model writes calls of tools is not known", param="tools")
    return template.tool_format
