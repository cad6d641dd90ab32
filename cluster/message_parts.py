"""What an assistant's text turns out to be: plain content, thoughts, or calls of tools, piece by piece as it comes."""

from __future__ import annotations

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
