"""Files that are sent as they are: the page at `/`, without a build step and without anything from elsewhere, and the
OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

import protos

FOLDER: Final = Path(__file__).parent / "page"
OPENAPI: Final = Path(protos.__file__).parent / "openapi.json"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str

    async def __call__(self, _request: Request) -> Response:
        return Response(self.content, media_type=self.media_type, headers=HEADERS)


def page_files() -> dict[str, PageFile]:
    """By path; the page itself at `/`. They tell nothing of the service, so they need no key."""
    found = {"/openapi.json": PageFile(OPENAPI.read_bytes(), "application/json")}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            where = "/" if path.name == INDEX else f"/page/{path.name}"
            found[where] = PageFile(path.read_bytes(), TYPES[path.suffix])
    return found
