"""Reads and checks the input file of a batch, line by line. Synchronous: for a thread beside the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.web.bodies import parse_object, validate
from planner.errors import InvalidRequest
from protos.openai_batches import BatchEndpoint, BatchError, BatchLine

MOST_ERRORS: Final = 100


def read_batch_lines(path: Path, skipped: frozenset[int] = frozenset()) -> Iterator[tuple[int, BatchLine]]:
    """Lines with their numbers, which count from 1, without those that are blank or `skipped`.

    Raises `InvalidRequest` for a line that is no request."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip() and number not in skipped:
                yield number, validate(BatchLine, parse_object(raw, "the line"))


def check_batch_file(path: Path, endpoint: BatchEndpoint, most_lines: int) -> tuple[int, list[BatchError]]:
    """How many lines there are, and what is wrong with the file: at most `MOST_ERRORS` of it.

    Bodies are not looked into: what is wrong with one of them is that line's own error."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if len(errors) == MOST_ERRORS:
                break
            if not raw.strip():
                continue
            try:
                line = validate(BatchLine, parse_object(raw, "the line"))
            except InvalidRequest as fault:
                errors.append(_error("invalid_json_line", fault.message, fault.param, number))
                continue
            if line.url != endpoint:
                errors.append(_error("mismatched_url", f"url is {line.url}; the batch is of {endpoint}", "url", number))
            elif line.custom_id in seen:
                message = f"the custom_id {line.custom_id!r} was there before"
                errors.append(_error("duplicate_custom_id", message, "custom_id", number))
            elif len(seen) == most_lines:
                errors.append(_error("too_many_lines", f"at most {most_lines} lines are taken", None, number))
                break
            seen.add(line.custom_id)
    if not seen and not errors:
        errors.append(_error("empty_file", "the file has no line", None, None))
    return len(seen), errors


def _error(code: str, message: str, param: str | None, line: int | None) -> BatchError:
    return BatchError(code=code, message=message, param=param, line=line)
