"""What grammars need to know of a model's tokens, as plain values. Free of torch and of any tokenizer library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]` are the bytes that id i stands for in a text, none where it has no spelling. `special` ids are marks
    and no text, `eos_ids` end an answer. `encode` writes a text as the model's tokenizer does where the text goes on
    from another one: the bytes of its ids joined are the text's."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    eos_ids: frozenset[int]
    encode: Callable[[str], list[int]]


VocabularySource = Callable[[], Vocabulary]
"""Reads the vocabulary; may be slow, and is called once, on a thread of its own."""
