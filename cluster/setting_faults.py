"""What is wrong with a setting, in the words of this project and not in pydantic's. Not for requests, whose errors
name fields of JSON (`cluster.web.bodies`)."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

_SUBJECTS: Final = ("Input should ", "String should ", "List should ", "Tuple should ", "Dictionary should ")


def told_fault(fault: ValidationError, name: str | None = None) -> str:
    """The first fault as a sentence, with the value that was given. `name`: the flag that the value was given to; other
    texts are not told, since they may be keys."""
    first = fault.errors(include_url=False)[0]
    given = f", not {first['input']!r}" if name or isinstance(first["input"], int | float) else ""
    name = name or ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{name}: unknown setting"
    if first["type"] == "missing":
        return f"{name} is missing"
    for subject in _SUBJECTS:
        if first["msg"].startswith(subject):
            wanted = first["msg"].removeprefix(subject).partition(", ")[0].replace(" after validation", "")
            return f"{name} must {wanted}{given}"
    told = first["msg"].removeprefix("Value error, ")
    return told if not name else f"{name} {told}" if told.startswith("must ") else f"{name}: {told}"
