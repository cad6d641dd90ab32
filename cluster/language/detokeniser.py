"""Tokens back to text, one token at a time, without ever showing half a character.

`TokenBytes` knows the bytes of every token of a vocabulary; a `Detokeniser` joins them through an incremental UTF-8
decoder, so each step costs the length of its token and no text is decoded twice. Pieces joined equal the tokenizer's
own decoding without special tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from planner.errors import UnsupportedModel

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "▁"
_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """The bytes that each token id stands for. Immutable; ids without a token stand for nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decode, self.leading_space = _token_decoder(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, index in vocabulary.items():
            table[index] = token.encode() if index in added else decode(token)
        self._table: tuple[bytes, ...] = tuple(table)
        self.special: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self._shown: tuple[bytes, ...] = tuple(b"" if i in self.special else b for i, b in enumerate(table))
        self._longest = max(map(len, table), default=1)
        self._lost = _lost_bytes(tokenizer, vocabulary)

    def __len__(self) -> int:
        return len(self._table)

    def least(self, text: str) -> int:
        """No encoding of `text` has fewer tokens: a bound that costs nothing, to refuse the hopeless early.

        Zero where the tokenizer may drop or join characters before it looks for tokens.
        """
        if self._lost is None:
            return 0
        return -(-len(text.encode().translate(None, self._lost)) // self._longest)

    def of(self, token: int) -> bytes:
        """Bytes of the token, special ones included."""
        return self._table[token] if 0 <= token < len(self._table) else b""

    def shown(self, token: int) -> bytes:
        """Bytes that a reader sees: none for special tokens."""
        return self._shown[token] if 0 <= token < len(self._shown) else b""

    def name(self, token: int) -> str:
        """A text that names the token: its characters, or `bytes:\\x..` where they are not whole characters."""
        raw = self.of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def id_name(token: int) -> str:
    """A text that names the token by its id, as vLLM's `return_tokens_as_token_ids` has it."""
    return f"token_id:{token}"


class Detokeniser:
    """One text that grows. Owner: the choice it belongs to.

    `from_start`: the tokens open a text rather than continue one, so that the space which a sentencepiece vocabulary
    puts before the first word is not part of it. `with_special`: special tokens are shown; else only `marks` are.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        from_start: bool = False,
        with_special: bool = False,
        marks: frozenset[int] = frozenset(),
    ) -> None:
        self._bytes_of = tokens.of if with_special else tokens.shown
        if marks and not with_special:
            self._bytes_of = lambda token: tokens.of(token) if token in marks else tokens.shown(token)
        self._utf8 = _UTF8(errors="replace")
        self._drop_space = from_start and tokens.leading_space

    def add(self, token: int) -> str:
        """The whole characters that became known with this token; what is begun and not whole waits."""
        return self._trim(self._utf8.decode(self._bytes_of(token)))

    def finish(self) -> str:
        """What is left: a replacement character when the text ended inside one. Starts over afterwards."""
        piece = self._trim(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return piece

    def _trim(self, piece: str) -> str:
        if self._drop_space and piece:
            self._drop_space = False
            return piece.removeprefix(" ")
        return piece


def detokenise(tokens: TokenBytes, ids: list[int], *, with_special: bool) -> str:
    """The text of `ids` at once."""
    text = Detokeniser(tokens, from_start=True, with_special=with_special)
    return "".join(map(text.add, ids)) + text.finish()


def _token_decoder(tokenizer: Tokenizer) -> tuple[Any, bool]:
    """How a token's spelling becomes bytes, and whether the first word of a text carries a space of its own."""
    parts = _decoder_parts(tokenizer)
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _from_byte_alphabet, False
    if "Metaspace" in kinds:
        space = next(part for part in parts if part["type"] == "Metaspace")
        return _from_metaspace, space.get("prepend_scheme", "always") != "never"
    replaced = {part.get("content") for part in parts if part["type"] == "Replace"}
    if "ByteFallback" in kinds and replaced == {" "}:
        return _from_metaspace, any(part["type"] == "Strip" and part.get("start") for part in parts)
    raise UnsupportedModel(f"tokenizer decoder of kind {sorted(kinds) or None} is not byte-level or sentencepiece")


def _lost_bytes(tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> bytes | None:
    """The bytes that encoding drops because the vocabulary has no token for them; every other one is in some token.

    None where no such thing can be said of the tokenizer.
    """
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    byte_level = {part["type"] for part in _decoder_parts(tokenizer)} == {"ByteLevel"}
    if strips or not byte_level or tokenizer.normalizer is not None:
        return None
    return bytes(byte for letter, byte in _ALPHABET.items() if letter not in vocabulary)


def _decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's printable character for each byte: itself where printable Latin-1, else from U+0100 up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_ALPHABET: Final = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode()
