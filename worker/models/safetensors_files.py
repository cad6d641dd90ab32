"""Which files of a folder hold its tensors, and whether they are whole. Free of torch, so that a model can be refused
before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from planner.errors import InvalidCheckpoint

_INDEX: Final = "model.safetensors.index.json"


def file_names(folder: Path) -> list[str]:
    """Names of the files, sorted. Raises `InvalidCheckpoint` where there is none, or one that the index names is not
    there."""
    index = folder / _INDEX
    if not index.exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise InvalidCheckpoint(f"{folder} has no .safetensors file")
        return names
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{_INDEX} is not a shard index: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise InvalidCheckpoint(f"{_INDEX} names {name!r}, which is not a file of its folder")
        if not (folder / name).exists():
            raise InvalidCheckpoint(f"{_INDEX} names {name}, which does not exist")
    return names


def check_files(folder: Path) -> None:
    """Raises `InvalidCheckpoint` naming the file that is missing, cut off or corrupt. Reads what each says of itself,
    and no tensor."""
    for name in file_names(folder):
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise InvalidCheckpoint(f"{name} cannot be read: {error}") from error
