"""What a program's file says of itself. Free of torch, so that a program can be inspected and refused by anybody.

The file is a PT2 archive (a zip): beside what torch keeps there, it has this metadata, the weights, and the small files
of the text side.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner.errors import InvalidProgram
from planner.slices import Method
from worker.config import Quantization

SUFFIX = ".pt2"
# Members of the archive, below the one folder that it has.
METADATA_MEMBER = "extra/raycomb.json"
WEIGHTS_FOLDER = "raycomb/weights/"
TEXT_FOLDER = "raycomb/text/"


class WeightEntry(BaseModel):
    """One weight: `member` names its bytes in the archive, uncompressed; `dtype` is torch's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]


class ProgramMetadata(BaseModel):
    """Everything that is known of a program without running it.

    * W = `max_prefill_tokens`, m = `min_prefill_tokens`: prefill takes m to W tokens and gives m to W rows of logits.
    * `widths`: those of decode, ascending from 1. `cells`: of the pool, where the program was told; any number works.
    * Cache geometry: per layer K and V `[cells, num_kv_heads, head_dim]` of `dtype`; `windows` has one entry a layer.
    * `platform`: what the compiled code needs of the processor or GPU. `torch`: the version that it was compiled by.
    * `source_sha256`: of the weights as they were read, before any quantization.
    * `weight_bytes`: what a decode reads of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1]
    name: str
    architecture: str
    vocab_size: int = Field(ge=1)
    context: int = Field(ge=1)
    max_prefill_tokens: int
    min_prefill_tokens: int
    widths: tuple[int, ...]
    cells: int | None = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    windows: tuple[int | None, ...]
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Quantization
    device: Literal["cpu", "cuda"]
    platform: tuple[str, ...]
    torch: str
    source_sha256: str
    weight_bytes: int = Field(ge=0)
    weights: dict[str, WeightEntry]

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        """Raises `InvalidProgram` with the numbers."""
        w, m = self.max_prefill_tokens, self.min_prefill_tokens
        if not 2 <= m <= w:
            raise InvalidProgram(f"the program's min_prefill_tokens must lie in [2, max_prefill_tokens = {w}], not {m}")
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise InvalidProgram(f"the program's decode widths must ascend from 1, not {self.widths}")
        if len(self.windows) != self.num_layers:
            raise InvalidProgram(f"the program has {len(self.windows)} windows for {self.num_layers} layers")
        return self


def method_name(method: Method, width: int | None = None) -> str:
    """The name of compiled code in the archive: a decode has one for each of its widths."""
    return f"{method.value}_{width}" if method is Method.DECODE else method.value


def own_constant(method: str, constant: str) -> str:
    """The name in the archive of a constant that the compiler made for one method alone."""
    return f"{method}.{constant}"


def read_metadata(path: Path) -> ProgramMetadata:
    """Raises `InvalidProgram` where the file is no program, or its metadata does not hold together."""
    with open_archive(path) as archive:
        return metadata_of(archive, path)


def open_archive(path: Path) -> zipfile.ZipFile:
    """The archive, to be closed. Raises `InvalidProgram` where the file is none, or is cut off."""
    try:
        return zipfile.ZipFile(path)
    except OSError as error:
        raise InvalidProgram(f"{path} cannot be read: {error.strerror or error}", param="model") from error
    except zipfile.BadZipFile as error:
        raise InvalidProgram(f"{path} is not a program, or not a whole one: {error}", param="model") from error


def metadata_of(archive: zipfile.ZipFile, path: Path) -> ProgramMetadata:
    try:
        text = archive.read(f"{root_of(archive)}/{METADATA_MEMBER}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise InvalidProgram(f"{path} is an archive without a program's metadata: {error}", param="model") from error
    try:
        return ProgramMetadata.model_validate_json(text)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidProgram(f"{path}: metadata {name}: {first['msg']}", param="model") from fault


def root_of(archive: zipfile.ZipFile) -> str:
    """The one folder that everything in a PT2 archive lies in."""
    names = archive.namelist()
    return names[0].partition("/")[0] if names else ""


def text_files(path: Path) -> dict[str, bytes]:
    """The files of the text side, by name."""
    with open_archive(path) as archive:
        prefix = f"{root_of(archive)}/{TEXT_FOLDER}"
        members = [name for name in archive.namelist() if name.startswith(prefix)]
        return {name.removeprefix(prefix): archive.read(name) for name in members}
