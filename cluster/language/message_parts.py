"""What an assistant's text turns out to be: plain content, thoughts, or calls of tools, piece by piece as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The `index`-th call of the answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which joined are a JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class CallNews:
    """What some parts say of one call: where it has begun among them, and the next piece of its arguments."""

    index: int
    begun: CallBegun | None
    arguments: str


def text_of(parts: Sequence[Part], kind: type[Content | Reasoning]) -> str:
    """All content among them, or all thoughts."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def call_news(parts: Sequence[Part]) -> list[CallNews]:
    """One for each call that they say anything of."""
    begun = {part.index: part for part in parts if isinstance(part, CallBegun)}
    arguments: dict[int, str] = dict.fromkeys(begun, "")
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    return [CallNews(index, begun.get(index), text) for index, text in arguments.items()]
