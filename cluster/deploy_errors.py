"""Finds our own setup error in what Serve tells of a deployment that does not start. Serve tells it as text only."""

from __future__ import annotations

import re

from planner.errors import SetupError

RAISED = re.compile(r"^(?:planner\.errors\.)(\w+): (.+)$", re.MULTILINE)


def setup_error_in(text: str) -> SetupError | None:
    """The last setup error that a traceback in `text` ends with, or None: then it may pass by itself."""
    classes: list[type[SetupError]] = [SetupError, *SetupError.__subclasses__()]
    kinds = {kind.__name__: kind for kind in classes}
    found = [(kinds[name], message) for name, message in RAISED.findall(text) if name in kinds]
    if not found:
        return None
    kind, message = found[-1]
    return kind(message.strip())
