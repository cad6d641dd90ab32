"""A checkpoint's chat template: from messages to the one prompt text that the model was trained on.

Templates are programs that came with the weights, so they run in Jinja's immutable sandbox. They get what they are
written against: the names and filters that the `transformers` library documents for chat templates.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.language.reasoning import CLOSING
from cluster.language.tool_formats import tool_format
from planner.errors import InvalidCheckpoint, InvalidRequest

Message = Mapping[str, Any]

_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
)


class ChatTemplate:
    """One compiled template. Immutable; safe to share between requests.

    `reads_tools`: whether it shows tools; `tool_format`: how the model then writes calls, where that is known;
    `thinks`: whether answers may begin with thoughts.

    Raises `InvalidCheckpoint` when the source is not a template.
    """

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidCheckpoint(f"the chat template does not compile: {error}", param="chat_template") from error
        self._options = frozenset(read) - _RESERVED
        self.reads_tools = "tools" in read
        self.tool_format = tool_format(source)
        self.thinks = CLOSING in source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text. With `continue_final_message` it ends where the last message's content ends.

        `options` are further variables; one that the template never reads is refused. Raises `InvalidRequest` with
        the template's own words when it objects to the messages.
        """
        options = options or {}
        for name in options:
            if name not in self._options:
                raise InvalidRequest(f"the chat template reads no option {name!r}", param="chat_template_kwargs")
        if not continue_final_message:
            return self._run(messages, add_generation_prompt, options, tools)
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        mark = f"<{secrets.token_hex(16)}>"
        last = messages[-1]
        text, found, _ = self._run(
            [*messages[:-1], {**last, "content": last["content"] + mark}], add_generation_prompt, options, tools
        ).rpartition(mark)
        if not found:
            raise InvalidRequest("the chat template does not show the last message", param="continue_final_message")
        return text

    def _run(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        try:
            return self._template.render(
                **options,
                **self._tokens,
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a stranger's program: it may raise anything at these messages
            message = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses these messages: {message}", param="messages") from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which is no business of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
