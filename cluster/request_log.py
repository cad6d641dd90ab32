"""The line that is logged of each request when it is over, and where it goes. What is in it: `cluster.request_record`.

A service may log thousands a second, so two things are done once that Serve's log would do more often. What is the
same for all lines of a process, such as which replica it is, is asked of the log's filters at the start: they take as
long as the rest of a line. And a file that rotates by its size asks for each record's text twice.
"""

from __future__ import annotations

import json
import logging
from logging.handlers import MemoryHandler, RotatingFileHandler
from typing import Any, Final

logger = logging.getLogger("raycomb.requests")
"""INFO: a line of JSON for each request that asks for tokens."""

TO_THE_FILE_ALONE: Final = {"skip_context_filter": True, "log_to_stderr": False}
"""Serve's filters let records with this pass without adding anything, and none goes to the error stream as well."""

OF_ONE_REQUEST: Final = frozenset({"request_id", "route", "task_id", "task_name", "task_func_name"})
"""What filters add that is not the same for all."""


class Alike(logging.Filter):
    """Adds the same attributes to every record."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__()
        self.attributes = attributes

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record).update(self.attributes)
        return True


class Once(logging.Formatter):
    """The text that another one makes of a record, made once where the same record comes again at once."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter
        self._last: tuple[logging.LogRecord, str] | None = None

    def format(self, record: logging.LogRecord) -> str:
        if self._last is not None and self._last[0] is record:
            return self._last[1]
        text = self._formatter.format(record)
        self._last = record, text
        return text


def log_requests_to(destination: logging.Logger, application: str) -> None:
    """Have the lines go where this process' other lines go, if that takes INFO; its handlers are there already."""
    logger.parent = destination
    alike = added_by_filters(destination) | {"application": application} | TO_THE_FILE_ALONE
    logger.filters[:] = [Alike(alike)]
    for handler in destination.handlers:
        file = handler.target if isinstance(handler, MemoryHandler) else handler
        if isinstance(file, RotatingFileHandler) and file.formatter is not None:
            file.setFormatter(Once(file.formatter))


def added_by_filters(destination: logging.Logger) -> dict[str, Any]:
    """What the filters of its handlers add to every record."""
    record = logging.LogRecord(logger.name, logging.INFO, __file__, 0, "", (), None)
    before = vars(record).copy()
    for handler in destination.handlers:
        handler.filter(record)
    return {name: value for name, value in vars(record).items() if name not in before | dict.fromkeys(OF_ONE_REQUEST)}


def wants_lines() -> bool:
    return logger.isEnabledFor(logging.INFO)


def log_line(request_id: str, told: dict[str, Any]) -> None:
    """One line of this, which also carries the id as the log's other lines do."""
    logger.info(json.dumps(told), extra={"request_id": request_id})
