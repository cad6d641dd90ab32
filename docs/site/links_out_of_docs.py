"""A hook of mkdocs: pages of the site that stand elsewhere in the repository, and links that lead out of docs/.

A file of `PAGES` becomes a page. Any other file that a page links to goes along as it is, below `files/`. So links are
written once, for readers of the repository, and hold on the site too; one that leads nowhere fails the build.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PAGES: Final = {
    "README.md": "index.md",
    "deploy/README.md": "deploying.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changes.md",
}
SOURCES: Final = {page: source for source, page in PAGES.items()}
FOLDER: Final = "files"
LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere, and what any page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    wanted = {target for file in files.documentation_pages() for target in _targets(file)}
    for target in sorted(wanted):
        if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file():
            files.append(File.generated(config, f"{FOLDER}/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each relative link into one that holds on the site."""
    here = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        target = _target(here, link[1])
        where = target.removeprefix("docs/") if target.startswith("docs/") else f"{FOLDER}/{target}"
        return posixpath.relpath(PAGES.get(target, where), posixpath.dirname(here) or ".")

    return LINK.sub(on_site, markdown)


def _targets(file: File) -> list[str]:
    return [_target(file.src_uri, link) for link in LINK.findall(file.content_string)]


def _target(page: str, link: str) -> str:
    """What `link` on `page` of the site means, as a path from the root of the repository."""
    source = SOURCES.get(page, f"docs/{page}")
    return os.path.normpath(posixpath.join(posixpath.dirname(source), link))
