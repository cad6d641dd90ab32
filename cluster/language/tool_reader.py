"""Finds the calls of tools in an answer's text while it comes. No text is lost: what is no call is content."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from cluster.language.call_scanner import CallScanner, NamedCallScanner, Verdict
from cluster.language.message_parts import CallArguments, CallBegun, Content, Part
from cluster.language.tool_formats import ToolFormat

_MARKS: Final = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.MISTRAL_ARGS: "[TOOL_CALLS]",
}
_ENDS: Final = ("</tool_call>", "]")
_SPACE: Final = " \n\r\t"
_BETWEEN: Final = {
    ToolFormat.HERMES: _SPACE,
    ToolFormat.LLAMA3_JSON: f"{_SPACE},;",
    ToolFormat.MISTRAL: f"{_SPACE},[",
    ToolFormat.MISTRAL_ARGS: _SPACE,
}
_NAMED_CALL: Final = re.compile(r"\s*([\w.:-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_NAME_SO_FAR: Final = re.compile(r"[\w.:-]+(?:\[[A-Z]*\]?)?\s*")
_ALPHABET: Final = string.ascii_letters + string.digits


class _State(Enum):
    """SEEKING: content, until a mark opens calls. OPENED: a call may begin here. CALLING: inside one. OVER: no call can
    follow, all is content."""

    SEEKING = auto()
    OPENED = auto()
    CALLING = auto()
    OVER = auto()


class ToolReader:
    """Owner: one choice's text. `names` are the functions on offer."""

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._mark = _MARKS.get(form, "")
        self._state = _State.SEEKING if self._mark else _State.OPENED
        self._buffer = ""  # not understood yet
        self._blank = ""  # white space that is content only if more content follows
        self._unspent = ""  # the mark, until a call has come of it
        self._call = CallScanner()
        self._told = False  # whether the call that is being read has been announced

    def push(self, text: str) -> list[Part]:
        """What is known with this text."""
        self._buffer += text
        parts: list[Part] = []
        turns = {_State.SEEKING: self._seek, _State.OPENED: self._begin, _State.CALLING: self._go_on}
        while True:
            before = self._state, len(self._buffer)
            if self._state is _State.OVER:
                text, self._buffer = self._buffer, ""
                parts += self._content(text)
            else:
                parts += turns[self._state]()
            if (self._state, len(self._buffer)) == before:
                return parts

    def finish(self) -> list[Part]:
        """What is left when the text has ended: a call that broke off is told as far as it came."""
        left, self._buffer = self._buffer, ""
        if self._state is _State.CALLING:
            left = "" if self._told else self._unspent + self._call.raw
        elif self._state is _State.OPENED:
            left = self._unspent + left if self._unspent or left.strip() else ""
        self._state = _State.OVER
        parts = list(self._content(left))
        if self._blank and not self.num_calls:
            parts.append(Content(self._blank))
        return parts

    def _seek(self) -> Iterator[Part]:
        """Content up to where a mark opens calls."""
        text, found, rest = self._buffer.partition(self._mark)
        if found:
            self._buffer, self._state, self._unspent = rest, _State.OPENED, self._mark
        else:
            kept = _overlap(text, self._mark)
            text, self._buffer = text[: len(text) - kept], text[len(text) - kept :]
        yield from self._content(text)

    def _begin(self) -> Iterator[Part]:
        """A call, the end of calls, or what turns out to be neither."""
        text = self._buffer.lstrip(_BETWEEN[self._form])
        if self._unspent or not self.num_calls:
            self._unspent += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        named = None if self._form is not ToolFormat.MISTRAL_ARGS else _NAMED_CALL.match(text)
        if text.startswith("{"):
            self._state, self._call, self._told = _State.CALLING, CallScanner(), False
        elif named is not None:
            self._buffer, self._state, self._told = text[named.end() :], _State.CALLING, False
            self._call = NamedCallScanner(named[1])
        elif self._mark and text.startswith(_ENDS):
            self._buffer, self._state = text.removeprefix(_ENDS[0]).removeprefix(_ENDS[1]), _State.SEEKING
        elif text and not (self._mark and (_ENDS[0].startswith(text) or _NAME_SO_FAR.fullmatch(text))):
            self._state = _State.SEEKING if self._mark else _State.OVER
            self._buffer = text[1:]  # whatever it is, its first character opens nothing
            yield from self._content(self._unspent + text[:1])

    def _go_on(self) -> Iterator[Part]:
        call = self._call
        arguments, self._buffer = call.push(self._buffer)
        if call.verdict is Verdict.CALL and not self._told and self._accepts(call.name):
            self._blank, self._unspent, self._told = "", "", True
            yield CallBegun(self.num_calls, self._new_id(), call.name)
            self.num_calls += 1
        if self._told and arguments:
            yield CallArguments(self.num_calls - 1, arguments)
        if call.complete:
            self._state = _State.SEEKING if self._form is ToolFormat.MISTRAL_ARGS else _State.OPENED
            if not self._told:
                self._state = _State.SEEKING if self._mark else _State.OVER
                yield from self._content(self._unspent + call.raw)

    def _accepts(self, name: str) -> bool:
        """Where nothing marks a call, an object is one only if it names a function on offer."""
        return self._form is not ToolFormat.LLAMA3_JSON or name in self._names

    def _content(self, text: str) -> Iterator[Part]:
        """White space waits: before a call, and behind one, it is not content."""
        text, self._blank = self._blank + text, ""
        if text.strip():
            kept = text if self.num_calls else text.rstrip()
            self._blank = text[len(kept) :]
            yield Content(kept)
        else:
            self._blank = text

    def _new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits, and nothing else."""
        name = "".join(secrets.choice(_ALPHABET) for _ in range(9))
        short = self._form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS)
        return name if short else f"call_{name}{secrets.token_hex(8)}"


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
