"""From the form that a client asks for to the grammar that workers keep to, checked before anything is queued.

JSON is written on one line, with `, ` and `: ` and no other white space, as Python's `json.dumps` does: white space
that a grammar leaves open is what small models fill their answers with. Not for masks: `worker.grammars` makes them.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher, grammar_from
from pydantic_core import from_json

from cluster.language.side_threads import SideThreads
from planner.errors import InvalidRequest
from protos.openai_structured import PlainFormat, SchemaFormat, Structured
from worker.grammars import check_grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR: Final = 256 * 1024  # characters
MAX_GBNF: Final = 64 * 1024  # characters, of which llguidance makes Lark in a time that grows with their square: 5 s
MAX_KNOWN: Final = 1024  # digests of grammars that were found good
_MAX_TRIED: Final = 200  # parts of a schema that are looked at for its mistake
_MAX_TRIED_LENGTH: Final = 4 << 20  # characters of them all, with the definitions that each is read with: 2 s at most
ONE_LINE: Final[JsonCompileOptions] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_LENGTH: Final = 2**62  # compiling takes longer than its text says, so it is never done on the event loop

# Where schemas stand in schemas: under a name each, in a list, or as the value itself.
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar and the field that asked for it. `schema`: what it was made of, where that is a JSON schema."""

    param: str
    grammar: str
    schema: dict[str, Any] | None = None


class FormReader:
    """Owner: the answer maker; lives on the event loop. Remembers which grammars it has found good."""

    def __init__(self, threads: SideThreads) -> None:
        self._threads = threads
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def requested(self, body: Structured) -> Form | None:
        """As `requested_form`, off the event loop where that takes long."""
        return await self._threads.run(self._threads.size_of(*form_fields(body)), lambda: requested_form(body))

    async def checked(self, form: Form | None) -> str | None:
        """The form's grammar; None for none. Raises `InvalidRequest` that names the field, and of a schema the part,
        that cannot be kept to."""
        if form is None:
            return None
        digest = hashlib.sha256(form.grammar.encode()).digest()
        if digest not in self._known:
            await self._threads.run(_ANY_LENGTH, lambda: check_form(form))
            self._known[digest] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        return form.grammar


def form_fields(body: Structured) -> list[object]:
    """What of a body forms are made of."""
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return [body.response_format, body.structured_outputs, *guided]


def requested_form(body: Structured) -> Form | None:
    """The one form that a body asks for; None where answers are free."""
    match body.response_format:
        case PlainFormat(type="json_object"):
            return json_form("response_format", {"type": "object"})
        case SchemaFormat() as asked:
            return json_form("response_format", asked.json_schema.json_schema)
    outputs = body.structured_outputs
    named = {"json": body.guided_json, "regex": body.guided_regex, "choice": body.guided_choice}
    forms = [(f"guided_{name}", name, value) for name, value in named.items()]
    forms.append(("guided_grammar", "grammar", body.guided_grammar))
    if outputs is not None:
        listed = {"json": outputs.json_schema, "regex": outputs.regex, "choice": outputs.choice}
        forms += [("structured_outputs", name, value) for name, value in listed.items()]
        forms.append(("structured_outputs", "grammar", outputs.grammar))
        if outputs.json_object:
            return json_form("structured_outputs", {"type": "object"})
    return next((_form(param, name, value) for param, name, value in forms if value is not None), None)


def json_form(param: str, schema: Any) -> Form:
    """The form of a JSON schema, given as a value or as its text. Raises `InvalidRequest`."""
    if isinstance(schema, str):
        try:
            schema = from_json(schema, allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequest(f"{param} is a text and not JSON: {error}", param=param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: the schema must be an object", param=param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=ONE_LINE)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: the schema cannot be read: {error}", param=param) from error
    return _sized(Form(param, grammar, schema))


def check_form(form: Form) -> None:
    """Raises `InvalidRequest` where the form's grammar does not compile."""
    fault = check_grammar(form.grammar)
    if fault is None:
        return
    where = "" if form.schema is None else f", at {_part_at_fault(form.schema)}"
    raise InvalidRequest(f"{form.param} cannot be kept to{where}: {_one_line(fault)}", param=form.param)


def _form(param: str, name: str, value: Any) -> Form:
    if name == "json":
        return json_form(param, value)
    _check_length(param, f"{param} has", sum(map(len, value)), MAX_GRAMMAR)  # reading it takes longer, and much so
    match name:
        case "regex":
            return _sized(Form(param, LLMatcher.grammar_from_regex(value)))
        case "choice":
            return _sized(Form(param, LLMatcher.grammar_from_regex("|".join(map(_literally, value)))))
    if re.search(r"::=", value) is None:
        return _sized(Form(param, LLMatcher.grammar_from_lark(value)))
    _check_length(param, f"{param}, which is GBNF, has", len(value), MAX_GBNF)
    try:
        return _sized(Form(param, grammar_from("gbnf", value)))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {_one_line(str(error))}", param=param) from error


def _sized(form: Form) -> Form:
    _check_length(form.param, f"{form.param} makes a grammar of", len(form.grammar), MAX_GRAMMAR)
    return form


def _check_length(param: str, words: str, length: int, most: int) -> None:
    if length > most:
        raise InvalidRequest(f"{words} {length} characters; at most {most} are allowed", param=param)


def _literally(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return re.sub(r"[^\w]", lambda found: f"\\x{{{ord(found[0]):x}}}", text, flags=re.ASCII)


def _part_at_fault(schema: dict[str, Any]) -> str:
    """A JSON pointer to the smallest part of a schema that does not compile by itself, as far as it was looked for."""
    where, part, tried, length = "", schema, 0, 0
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while True:
        for below, child in _parts(part):
            whole = LLMatcher.grammar_from_json_schema({**definitions, **child}, overrides=ONE_LINE)
            tried, length = tried + 1, length + len(whole)
            if tried > _MAX_TRIED or length > _MAX_TRIED_LENGTH:
                return _pointer(where)
            if check_grammar(whole) is not None:
                where, part = where + below, child
                break
        else:
            return _pointer(where)


def _pointer(where: str) -> str:
    return f"#{where}"


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly in a schema, and where they stand."""
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            yield from ((f"/{name}/{key}", part) for key, part in schema[name].items() if isinstance(part, dict))
    for name in _LISTED:
        if isinstance(schema.get(name), list):
            yield from ((f"/{name}/{i}", part) for i, part in enumerate(schema[name]) if isinstance(part, dict))
    for name in _SINGLE:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def _one_line(text: str) -> str:
    return " ".join(text.split())
