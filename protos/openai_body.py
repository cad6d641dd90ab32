"""What the bodies of all OpenAI-compatible endpoints have in common.

Types are strict: `true` is no integer, `"3"` no number, 2.5 no count, and infinity nothing at all. A null means that
the field was not given. A field that nothing here knows is refused by its name, and so is one that is known and not
supported, unless its value asks for what happens anyway (`best_of` 1, an empty `tools`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

Neutral = Mapping[str, tuple[Any, ...]]
"""Known fields that are not supported, and for each the values that ask for nothing special."""


class RefusedField(ValueError):
    """A field whose presence or value is refused. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Neutral] = {}

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
                raise RefusedField(name, f"{name} is not a field of this request")
            kept[name] = value
        return kept
