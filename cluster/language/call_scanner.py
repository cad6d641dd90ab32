"""Reads one call as models write it, `{"name": ..., "arguments": {...}}`, and passes its arguments on as they come."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any, Final

from pydantic_core import from_json

from cluster.language.json_end import JsonEnd

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


class Verdict(Enum):
    """What the object is: not known yet, a call, or something else."""

    OPEN = auto()
    CALL = auto()
    OTHER = auto()


class CallScanner:
    """Owner: one reader. `raw` is all that was taken in, `name` is known from verdict CALL on."""

    def __init__(self) -> None:
        self.raw = ""
        self.name = ""
        self.verdict = Verdict.OPEN
        self.complete = False
        self._object = JsonEnd()
        self._arguments: JsonEnd | None = None

    def push(self, text: str) -> tuple[str, str]:
        """Take in the object's next characters; returns what is known of the arguments since, and what follows the
        object in `text`."""
        end = self._object.feed(text)
        self.complete = end is not None
        taken, rest = (text, "") if end is None else (text[:end], text[end:])
        self.raw += taken
        if self.verdict is Verdict.CALL:
            return self._pass_on(taken), rest
        if self.verdict is Verdict.OPEN and (head := _HEAD.match(self.raw)) is not None:
            name = _read(head[1])
            self.verdict = Verdict.CALL if isinstance(name, str) else Verdict.OTHER
            if isinstance(name, str):
                self.name, self._arguments = name, JsonEnd()
                return self._pass_on(self.raw[head.end() :]), rest
        return (self._read_whole() if self.complete else ""), rest

    def _pass_on(self, text: str) -> str:
        if self._arguments is None:
            return ""
        end = self._arguments.feed(text)
        if end is None:
            return text
        self._arguments = None
        return text[:end]

    def _read_whole(self) -> str:
        """A complete object whose head was not the usual one: the keys in another order, or arguments as a text."""
        self.verdict = Verdict.OTHER
        value = _read(self.raw)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return ""
        arguments = value.get("arguments", value.get("parameters", {}))
        self.verdict, self.name = Verdict.CALL, value["name"]
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read(text: str) -> Any:
    """The value of a JSON text; None also where a model wrote something else, or halves of characters."""
    try:
        return from_json(text)
    except ValueError:
        return None


class NamedCallScanner(CallScanner):
    """A call whose name stood before its arguments, which are the whole object."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.verdict, self._arguments = name, Verdict.CALL, JsonEnd()
