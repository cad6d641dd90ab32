"""Setup errors of our own, made of what Ray raises and of what Serve tells of a deployment, as text only."""

from __future__ import annotations

import re
from collections.abc import Callable

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


def start_ray(start: Callable[[], object]) -> None:
    """Raises `SetupError` where it does not start. Ray's own exceptions have no class in common but the widest."""
    try:
        start()
    except Exception as error:
        told = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SetupError(f"Ray did not start: {told} (on a busy machine, try again; its logs: /tmp/ray)") from error
