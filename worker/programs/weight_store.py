"""A program's weights inside its archive: each one's bytes as they are, aligned, so that a reader maps them.

Mapping copies nothing and reads only what is touched; methods of one program, and processes on one machine, share it.
"""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from planner.errors import InvalidProgram
from worker.programs.metadata import WEIGHTS_FOLDER, WeightEntry, metadata_of, open_archive, root_of

_ALIGNMENT = 64
# A zip member: a header of 30 bytes, its name, extra fields (each with a header of 4 bytes), its bytes.
_HEADER = struct.Struct("<26xHH")
_EXTRA_HEADER = struct.Struct("<HH")
_PADDING_ID = 0x5250


def write_weights(archive: zipfile.ZipFile, root: str, weights: Mapping[str, Tensor]) -> None:
    """Append each weight to an archive that is open for appending."""
    for name, tensor in weights.items():
        # Written through a stream, as a member that is not compressed, with a padding field before its bytes.
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        info = zipfile.ZipInfo(f"{root}/{WEIGHTS_FOLDER}{name}")
        # Room for the sizes of a large member, which the writer itself puts before our field.
        large = 20 if data.nbytes >= zipfile.ZIP64_LIMIT else 0
        before = archive.start_dir + _HEADER.size + len(info.filename.encode()) + large + _EXTRA_HEADER.size
        padding = -before % _ALIGNMENT
        info.extra = _EXTRA_HEADER.pack(_PADDING_ID, padding) + bytes(padding)
        info.file_size = data.nbytes
        with archive.open(info, "w", force_zip64=bool(large)) as file:
            file.write(data.data)


def map_weights(path: Path) -> dict[str, Tensor]:
    """All weights, on the CPU, as views of the mapped file; a page that is written to becomes this process's own.

    Raises `InvalidProgram` naming the weight whose bytes are not there.
    """
    with open_archive(path) as archive, path.open("rb") as file:
        entries = metadata_of(archive, path).weights
        prefix = f"{root_of(archive)}/{WEIGHTS_FOLDER}"
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: _view(mapped, archive, prefix + name, entry) for name, entry in entries.items()}


def _view(mapped: mmap.mmap, archive: zipfile.ZipFile, member: str, entry: WeightEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidProgram(f"the weight {member} has dtype {entry.dtype}, which this torch does not know")
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    try:
        info = archive.getinfo(member)
    except KeyError as error:
        raise InvalidProgram(f"the program has no weight {member}") from error
    if info.file_size != num_bytes or info.compress_type != zipfile.ZIP_STORED:
        raise InvalidProgram(f"the weight {member} has {info.file_size} bytes, not {num_bytes}")
    name_size, extra_size = _HEADER.unpack_from(mapped, info.header_offset)
    start = info.header_offset + _HEADER.size + name_size + extra_size
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=start)
    return raw.view(dtype).view(entry.shape)
