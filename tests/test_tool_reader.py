"""Calls are found in a text however it is cut, their arguments come as they are written, and no text is lost."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from cluster.language.message_parts import CallArguments, CallBegun, Content, Part, Reasoning
from cluster.language.message_reader import MessageReader
from cluster.language.reasoning import ReasoningReader
from cluster.language.tool_formats import ToolFormat, tool_format
from cluster.language.tool_reader import ToolReader

NAMES = frozenset({"get_weather", "add"})
PARIS = '{"city": "Paris {\\"x\\"}]"}'
SUM = '{"a": 1, "b": [2, {}]}'
TWO = [("get_weather", PARIS), ("add", SUM)]

DEEP = '{"a":' * 3000 + "1" + "}" * 3000
NO_CALLS = [
    '{"name": "get\\dweather", "arguments": {}}',
    '{"name": "get\nweather", "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"arguments": {"a": "\\ud800"}, "name": "add"}',
    '{"arguments": ' + DEEP + ', "name": "add"}',
]
"""What looks like a call and is no JSON, or none that can be told."""

Read = tuple[str, list[tuple[str, str]], str]


def gather(parts: list[Part]) -> Read:
    """Content, calls, thoughts."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.text)
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, calls, "".join(part.text for part in parts if isinstance(part, Reasoning))


def read(reader: ToolReader | MessageReader | ReasoningReader, *pieces: str) -> Read:
    parts = [part for piece in pieces for part in reader.push(piece)]
    return gather(parts + reader.finish())


def cuts(text: str, num: int = 12) -> list[list[str]]:
    """The text whole, letter by letter, and cut at random."""
    found = [[text], list(text)]
    for seed in range(num):
        draw = random.Random(seed)
        edges = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(draw.randint(1, 9)))})
        found.append([text[a:b] for a, b in itertools.pairwise(edges)])
    return found


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (
        ToolFormat.HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>',
        "Let me see.",
        TWO,
    ),
    (
        ToolFormat.HERMES,
        "Plain <tool talk> of 1 < 2, and {json: no}.\n",
        "Plain <tool talk> of 1 < 2, and {json: no}.\n",
        [],
    ),
    (ToolFormat.HERMES, "<tool_call>\nno object\n</tool_call> more", "<tool_call>\nno object\n</tool_call> more", []),
    (ToolFormat.HERMES, '<tool_call>\n{"broken": 1}\n</tool_call>', '<tool_call>\n{"broken": 1}\n</tool_call>', []),
    (ToolFormat.HERMES, f'<tool_call>{{"arguments": {SUM}, "name": "add"}}</tool_call>', "", [("add", SUM)]),
    *[(ToolFormat.HERMES, f"<tool_call>{text}</tool_call>", f"<tool_call>{text}</tool_call>", []) for text in NO_CALLS],
    (
        ToolFormat.HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (ToolFormat.HERMES, '<tool_call>{"name": "new_one", "arguments": {}}</tool_call>', "", [("new_one", "{}")]),
    (ToolFormat.LLAMA3_JSON, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", TWO[:1]),
    (
        ToolFormat.LLAMA3_JSON,
        f'\n{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "add", "parameters": {SUM}}}',
        "",
        TWO,
    ),
    (ToolFormat.LLAMA3_JSON, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (ToolFormat.LLAMA3_JSON, 'Sure: {"name": "add", "parameters": {}}', 'Sure: {"name": "add", "parameters": {}}', []),
    (ToolFormat.LLAMA3_JSON, '{"a": 1} and so on', '{"a": 1} and so on', []),
    (
        ToolFormat.MISTRAL,
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {SUM}}}]',
        "",
        TWO,
    ),
    (ToolFormat.MISTRAL_ARGS, f"Hm.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{SUM}", "Hm.", TWO),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in cuts(text):
        found = read(ToolReader(form, NAMES), *pieces)
        assert found[:2] == (content, calls), pieces
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])


def test_arguments_come_while_they_are_written() -> None:
    reader = ToolReader(ToolFormat.HERMES, NAMES)
    seen: list[str] = []
    for letter in f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>':
        seen += [part.text for part in reader.push(letter) if isinstance(part, CallArguments)]
    assert len(seen) >= len(SUM) - 1
    assert "".join(seen) == SUM


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
        ('<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
        ("Well <tool_", "Well <tool_", []),
        ("<tool_call>\n", "<tool_call>\n", []),
        ("   ", "   ", []),
    ],
)
def test_an_answer_that_breaks_off_loses_nothing(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        assert read(ToolReader(ToolFormat.HERMES, NAMES), *pieces)[:2] == (content, calls)


def test_ids_differ_and_fit_the_format() -> None:
    ids = []
    for _ in range(20):
        parts = ToolReader(ToolFormat.MISTRAL, NAMES).push('[TOOL_CALLS][{"name": "add", "arguments": {}}]')
        ids += [part.id for part in parts if isinstance(part, CallBegun)]
    assert len(set(ids)) == 20
    assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize(
    ("text", "begun", "content", "thoughts"),
    [
        ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", False, "Yes.", "\nHm, 1 < 2.\n"),
        ("Hm.</think>\nYes.\n", True, "Yes.\n", "Hm."),
        ("No thoughts <think> here", False, "No thoughts <think> here", ""),
        ("<thin", False, "<thin", ""),
        ("<think>cut off </thi", False, "", "cut off </thi"),
        ("", False, "", ""),
    ],
)
def test_thoughts_are_told_from_the_answer(text: str, begun: bool, content: str, thoughts: str) -> None:
    for pieces in cuts(text) if text else [[""]]:
        found = read(MessageReader(ReasoningReader(begun=begun)), *pieces)
        assert (found[0], found[2]) == (content, thoughts), pieces


def test_a_call_may_follow_thoughts() -> None:
    text = f'<think>add?</think>\n\n<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>'
    for pieces in cuts(text):
        reader = MessageReader(ReasoningReader(begun=False), ToolReader(ToolFormat.HERMES, NAMES))
        assert read(reader, *pieces) == ("", [("add", SUM)], "add?")
        assert reader.num_calls == 1


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call></tool_call> ...", ToolFormat.HERMES),
        ("... [TOOL_CALLS] ...", ToolFormat.MISTRAL),
        ("... [TOOL_CALLS] ... [ARGS] ...", ToolFormat.MISTRAL_ARGS),
        ("... <|python_tag|> ...", ToolFormat.LLAMA3_JSON),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, form: ToolFormat | None) -> None:
    assert tool_format(template) is form
