"""Grammars over the tiny text model's vocabulary, and a walk that writes an answer without any model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.answers.structured import json_form
from tests.tiny_text import tiny_text
from worker.grammars import Grammars
from worker.masks import BitMask, ConstrainedRow

TEXT = tiny_text()
EOS = min(TEXT.eos_ids)


class OneByOne(Grammars):
    """Tells of no forced token, so that each is drawn."""

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        return [() for _ in rows]


def schema_grammar(schema: dict[str, Any]) -> str:
    return json_form("response_format", schema).grammar


def row(grammar: str, generated: Sequence[int] = (), sequence_id: int = 1, **options: Any) -> ConstrainedRow:
    return ConstrainedRow(sequence_id, grammar, np.array(generated, dtype=np.int64), **options)


def mask_of(grammars: Grammars, asked: ConstrainedRow) -> BitMask:
    mask = grammars.masks([asked])[0]
    assert isinstance(mask, np.ndarray), mask
    return mask


def allowed(mask: BitMask) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return found


def walk(grammars: Grammars, grammar: str, seed: int, max_tokens: int = 600, sequence_id: int = 1) -> str | None:
    """An answer of tokens drawn at random from the masks; None where it did not end within `max_tokens`."""
    draw, tokens = random.Random(seed), list[int]()
    while len(tokens) < max_tokens:
        token = draw.choice(allowed(mask_of(grammars, row(grammar, tokens, sequence_id))))
        if token == EOS:
            grammars.drop([sequence_id])
            return TEXT.decode(tokens)
        tokens.append(token)
    grammars.drop([sequence_id])
    return None


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
