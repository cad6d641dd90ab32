"""The form of an answer over HTTP: which fields ask for one, what reaches the workers, and what is refused and how."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.answers.structured import MAX_GBNF, MAX_GRAMMAR
from cluster.language.detokeniser import TokenBytes
from cluster.language.text import TextModel
from tests.grammar_rig import TEXT, allowed, mask_of, row, schema_grammar, walk
from tests.http_desk import CHAT, PROMPT, desk, refusal
from tests.tiny_text import tiny_tokenizer
from worker.grammars import Grammars

COLOUR: dict[str, Any] = {"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"]}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def grammar_of(**asked: Any) -> str | None:
    async with desk() as d:
        answer = await d.post("/v1/chat/completions", **CHAT, **asked)
        assert answer.status_code == 200, answer.text
        return d.fleet.requests[0].sampling.grammar


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": schema_format(COLOUR)},
        {"guided_json": COLOUR},
        {"guided_json": '{"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"]}'},
        {"structured_outputs": {"json": COLOUR}},
        {"response_format": {"type": "text"}, "guided_json": COLOUR},
    ],
)
async def test_every_way_to_send_a_schema_makes_the_same_grammar(asked: dict[str, Any]) -> None:
    assert await grammar_of(**asked) == schema_grammar(COLOUR)


async def test_plain_answers_have_no_grammar() -> None:
    assert await grammar_of() is None
    assert await grammar_of(response_format={"type": "text"}) is None


async def test_text_completions_take_forms_too() -> None:
    async with desk() as d:
        await d.post("/v1/completions", **PROMPT, guided_regex="[a-c]{3}")
        grammar = d.fleet.requests[0].sampling.grammar
    grammars = Grammars(TEXT.vocabulary)
    assert {len(walk(grammars, grammar, seed) or "") for seed in range(10)} == {3}
    grammars.close()


async def test_choices_are_taken_by_the_letter() -> None:
    texts = {"a+b", "é|c", "line\nend", "\\d"}
    grammar = await grammar_of(guided_choice=sorted(texts))
    assert grammar is not None
    grammars = Grammars(TEXT.vocabulary)
    assert {walk(grammars, grammar, seed) for seed in range(60)} == texts
    grammars.close()


@pytest.mark.parametrize("source", ['root ::= "a" | "b"', 'start: "a" | "b"'])
async def test_both_notations_of_grammars_are_read(source: str) -> None:
    grammar = await grammar_of(guided_grammar=source)
    assert grammar is not None
    grammars = Grammars(TEXT.vocabulary)
    assert allowed(mask_of(grammars, row(grammar))) == sorted(TEXT.encode("a") + TEXT.encode("b"))
    grammars.close()


async def test_json_mode_gives_an_object_on_one_line() -> None:
    grammar = await grammar_of(response_format={"type": "json_object"})
    assert grammar == schema_grammar({"type": "object"})
    grammars = Grammars(TEXT.vocabulary)
    start = allowed(mask_of(grammars, row(grammar)))
    assert {TEXT.decode([token])[0] for token in start} == {"{"}
    grammars.close()


def many_parts(num_links: int) -> dict[str, Any]:
    """A hundred parts that compile, and one that does not; each of them is read with a chain of definitions."""
    links = {f"link-{i}": {"items": {"$ref": f"#/$defs/link-{i + 1}"}} for i in range(num_links)}
    parts = {f"part-{i}": {"$ref": "#/$defs/link-0"} for i in range(100)} | {"bad": {"uniqueItems": True}}
    return {"properties": parts, "$defs": links | {f"link-{num_links}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": {"not": {"type": "string"}}}}}, "at #/properties/a/items: Unimplemented"),
        ({"properties": {"a": {"type": "string", "pattern": "(un"}}}, "at #/properties/a: regex parse error"),
        ({"anyOf": [{"type": "string"}, {"type": "strange"}]}, "at #/anyOf/1: Invalid type: strange"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"uniqueItems": True}}}, "uniqueItems"),
        ({"$ref": "https://example.com/schema"}, "at #: "),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "at #: oneOf"),
        (many_parts(num_links=10), "at #/properties/bad: "),
        (many_parts(num_links=2500), "at #: "),  # where looking would take long, the fault alone is told
        (False, "the schema must be an object"),
    ],
)
async def test_a_schema_that_cannot_be_kept_to_is_refused_by_its_part(schema: Any, words: str) -> None:
    async with desk() as d:
        error = refusal(await d.post("/v1/chat/completions", **CHAT, response_format=schema_format(schema)))
        assert error["param"] == "response_format"
        assert words in error["message"]
        assert not d.fleet.requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": ["text"]}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "more": 1}}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("guided_regex", "(un"),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("guided_choice", [""]),
        ("guided_grammar", "start: nothing"),
        ("guided_grammar", "root ::= nothing nowhere %%"),
        ("guided_json", "{"),
        ("guided_json", "3"),
        ("guided_json", "[" * 100_000),
        ("guided_json", '{"properties": {"\\ud800": {}}}'),
        ("guided_json", '{"const": NaN}'),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"structural_tag": "x"}),
        ("guided_choice", ["x" * MAX_GRAMMAR]),
        ("guided_grammar", 'root ::= "a"' + " " * MAX_GBNF),
    ],
)
async def test_a_form_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    async with desk() as d:
        error = refusal(await d.post("/v1/chat/completions", **CHAT, **{field: value}))
        assert error["param"] == field
        assert not d.fleet.requests


async def test_two_forms_at_once_are_refused() -> None:
    async with desk() as d:
        two = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
        assert refusal(await d.post("/v1/chat/completions", **CHAT, **two))["param"] == "guided_regex"


async def test_a_model_without_an_end_token_takes_no_form() -> None:
    endless = TextModel(tiny_tokenizer(), eos_ids=frozenset())
    assert isinstance(endless.tokens, TokenBytes)
    async with desk(text=endless) as d:
        error = refusal(await d.post("/v1/completions", **PROMPT, guided_regex="a"))
        assert "no token that ends" in error["message"]
