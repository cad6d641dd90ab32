"""The version of Raycomb, said here alone: the distribution, `/version`, the reference and the command all read it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Final

VERSION: Final = "0.1.0"
BENEATH: Final = ("ray", "torch")
"""Packages whose versions decide what works. They are not imported for it."""


def versions() -> dict[str, str | None]:
    """Of Python, of Raycomb and of what is beneath it; None where a package is not installed."""
    return {
        "python": platform.python_version(),
        "raycomb": VERSION,
        **{name: installed_version(name) for name in BENEATH},
    }


def installed_version(package: str) -> str | None:
    """As the package's own metadata has it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_line() -> str:
    """For people."""
    found = versions()
    others = ", ".join(f"{name} {found[name] or 'missing'}" for name in ("python", *BENEATH))
    return f"raycomb {VERSION} ({others})"
