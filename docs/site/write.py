"""Writes the pages that are made out of code: `python -m docs.site.write`. They are committed; a test compares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs.site.commands_page import commands_page
from docs.site.grpc_page import grpc_page
from docs.site.http_page import http_page
from docs.site.openapi import openapi

DOCS: Final = Path(__file__).resolve().parent.parent
PAGES: Final[dict[str, Callable[[], str]]] = {
    "api.md": http_page,
    "openapi.json": openapi,
    "grpc.md": grpc_page,
    "commands.md": commands_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        sys.stdout.write(f"{name}\n")
