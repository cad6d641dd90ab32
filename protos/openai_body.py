"""What the bodies of all OpenAI-compatible endpoints have in common.

Types are strict: `true` is no integer, `"3"` no number, 2.5 no count, and infinity nothing at all. A null means that
the field was not given. A field that nothing here knows is refused by its name, and so is one that is known and not
supported, unless its value asks for what happens anyway (`best_of` 1, an empty `tools`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, model_validator

Neutral = Mapping[str, tuple[Any, ...]]
"""Known fields that are not supported, and for each the values that ask for nothing special."""

ALIKE: Final = 0.8
"""From 0 to 1: an unknown field that is less like a known one was meant for something else."""

LONGEST_NAME: Final = 40
"""Longer names are compared to none: they would take their time."""


class RefusedField(ValueError):
    """A field whose presence or value is refused. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def only_text(part: Any, kinds: tuple[str, ...], param: str) -> Any:
    """`part`, a piece of a message's content. Raises `RefusedField` where it is of a kind that is not in `kinds`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise RefusedField(param, f"content of type {kind[:LONGEST_NAME]} is not supported; this model reads text")
    return part


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Neutral] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Fields of other endpoints, and which."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        """Without nulls, and without unsupported fields at their neutral value."""
        if not isinstance(data, dict):
            return data
        kept = {}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.unsupported:
                if any(type(value) is type(neutral) and value == neutral for neutral in cls.unsupported[name]):
                    continue
                raise RefusedField(name, f"{name} is not supported here")
            if name not in known:
                raise RefusedField(name, f"{name} is not a field of this request{cls._hint(name, known)}")
            kept[name] = value
        return kept

    @classmethod
    def _hint(cls, name: str, known: Iterable[str]) -> str:
        """What may have been meant by a field that is unknown; nothing where nothing is alike."""
        if name in cls.elsewhere:
            return f"; {cls.elsewhere[name]}"
        close = get_close_matches(name, known, n=1, cutoff=ALIKE) if len(name) <= LONGEST_NAME else []
        return f"; did you mean {close[0]}?" if close else ""
