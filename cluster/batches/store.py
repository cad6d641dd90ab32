"""Files and batches on disk, so that they outlive every process: an SQLite database, and a folder of files beside it.

Synchronous, and for one thread at a time; `cluster.batches.desk` keeps it off the event loop. Several processes of one
host may share a folder: what runs a batch holds a lease on it, which ends by itself when that process does.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from planner.errors import InvalidRequest, QueueFull, UnknownBatch, UnknownFile
from protos.openai_batches import ENDED, Batch, FileCard, RequestCounts

LEASE_S: Final = 20.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, account TEXT NOT NULL, card TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, account TEXT NOT NULL, batch TEXT NOT NULL,
    ended INTEGER NOT NULL, runner TEXT, leased_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""


class Page(NamedTuple):
    """Part of a list, newest first unless `oldest_first`: `limit` entries behind the one with the id `after`."""

    after: str | None = None
    limit: int = 20
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """A batch and whose it is."""

    batch: Batch
    account: str


class BatchStore:
    """Owner of the folder's contents, with others of its kind in other processes. Raises `sqlite3.Error` and `OSError`
    where the disk fails."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Makes the folder where there is none; only its owner may read it, since prompts are in it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "files").mkdir(mode=0o700, exist_ok=True)
        self._files = folder / "files"
        self._clock = clock
        self._database = sqlite3.connect(
            folder / "batches.sqlite", timeout=30, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    # Files.

    def new_path(self) -> Path:
        """Where a file may be written before it is added."""
        return self._files / f"new-{uuid.uuid4().hex}"

    def add_file(
        self, account: str, written: Path, name: str, purpose: Literal["batch", "batch_output"], most: int | None = None
    ) -> FileCard:
        """Take over what was written to a `new_path`. Raises `QueueFull` where the account has `most` files."""
        count = "SELECT count(*) FROM files WHERE account = ?"
        if most is not None and self._one(count, account)[0] >= most:
            raise QueueFull(f"{most} files are kept; no more may be: delete one", retry_after_s=60.0)
        card = FileCard(
            id=f"file-{uuid.uuid4().hex}",
            bytes=written.stat().st_size,
            created_at=int(self._clock()),
            filename=name,
            purpose=purpose,
        )
        written.rename(self._files / card.id)
        self._run("INSERT INTO files (id, account, card) VALUES (?, ?, ?)", card.id, account, card.model_dump_json())
        return card

    def file(self, account: str, file_id: str, param: str = "file_id") -> FileCard:
        """Raises `UnknownFile`; `param` is what named the file."""
        found = self._run("SELECT card FROM files WHERE id = ? AND account = ?", file_id, account).fetchone()
        if found is None:
            raise UnknownFile(f"there is no file {file_id!r}", param=param)
        return FileCard.model_validate_json(found[0])

    def path(self, account: str, file_id: str) -> Path:
        """Where the file's bytes are. Raises `UnknownFile`."""
        return self._files / self.file(account, file_id).id

    def files(self, account: str, purpose: str | None, page: Page) -> tuple[list[FileCard], bool]:
        """The account's files, those of one `purpose` where it is given, and whether there are more."""
        behind, order = (">", "ASC") if page.oldest_first else ("<", "DESC")
        text = f"SELECT card FROM files WHERE account = ? AND number {behind} ? AND json_extract(card, '$.purpose') = "
        text += f"coalesce(?, json_extract(card, '$.purpose')) ORDER BY number {order} LIMIT ?"
        rows = self._run(text, account, self._behind("files", account, page), purpose, page.limit + 1)
        cards = [FileCard.model_validate_json(card) for (card,) in rows]
        return cards[: page.limit], len(cards) > page.limit

    def delete_file(self, account: str, file_id: str) -> None:
        """Raises `UnknownFile`, and `InvalidRequest` while a batch reads it."""
        path = self.path(account, file_id)
        for (text,) in self._run("SELECT batch FROM batches WHERE account = ? AND ended = 0", account):
            if (batch := Batch.model_validate_json(text)).input_file_id == file_id:
                raise InvalidRequest(f"the batch {batch.id} still reads this file", param="file_id")
        self._run("DELETE FROM files WHERE id = ?", file_id)
        path.unlink(missing_ok=True)

    # Batches.

    def add_batch(self, account: str, batch: Batch, most_open: int) -> None:
        """Raises `QueueFull` where the account has `most_open` batches that have not ended."""
        count = "SELECT count(*) FROM batches WHERE account = ? AND ended = 0"
        if self._one(count, account)[0] >= most_open:
            raise QueueFull(f"{most_open} batches have not ended; no more may be open", retry_after_s=60.0)
        text = batch.model_dump_json()
        self._run("INSERT INTO batches (id, account, batch, ended) VALUES (?, ?, ?, 0)", batch.id, account, text)

    def batch(self, account: str, batch_id: str) -> Batch:
        """As it stands. Raises `UnknownBatch`."""
        found = self._run("SELECT batch FROM batches WHERE id = ? AND account = ?", batch_id, account).fetchone()
        if found is None:
            raise UnknownBatch(f"there is no batch {batch_id!r}", param="batch_id")
        return self._counted(Batch.model_validate_json(found[0]))

    def batches(self, account: str, page: Page) -> tuple[list[Batch], bool]:
        """The account's batches, and whether there are more."""
        text = "SELECT batch FROM batches WHERE account = ? AND number < ? ORDER BY number DESC LIMIT ?"
        rows = self._run(text, account, self._behind("batches", account, page), page.limit + 1).fetchall()
        found = [self._counted(Batch.model_validate_json(batch)) for (batch,) in rows]
        return found[: page.limit], len(found) > page.limit

    def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Read, change and write a batch as one step; others see it before or after."""
        with self._transaction():
            text = self._one("SELECT batch FROM batches WHERE id = ?", batch_id)[0]
            changed = change(Batch.model_validate_json(text))
            ended = changed.status in ENDED
            self._run(
                "UPDATE batches SET batch = ?, ended = ? WHERE id = ?", changed.model_dump_json(), ended, batch_id
            )
        return self._counted(changed)

    def finish(self, account: str, batch_id: str, status: Literal["completed", "cancelled", "expired"]) -> None:
        """Make files of the results, and end the batch. Done as a whole, or not at all."""
        now = int(self._clock())

        def change(batch: Batch) -> Batch:
            if batch.status in ENDED:
                return batch
            output, errors = (self._write_results(account, batch_id, failed=failed) for failed in (False, True))
            ended = {
                "status": status,
                f"{status}_at": now,
                "finalizing_at": now,
                "request_counts": self.counts(batch),
                "output_file_id": output,
                "error_file_id": errors,
            }
            self._run("DELETE FROM results WHERE batch_id = ?", batch_id)
            return batch.model_copy(update=ended)

        self.change(batch_id, change)

    def claim(self, runner: str) -> Claimed | None:
        """The oldest batch that has not ended and that nobody runs; it is `runner`'s for `LEASE_S` from now on."""
        now = self._clock()
        found = self._run(
            "UPDATE batches SET runner = ?, leased_until = ? WHERE number = (SELECT number FROM batches "
            "WHERE ended = 0 AND leased_until < ? ORDER BY number LIMIT 1) RETURNING batch, account",
            runner, now + LEASE_S, now,
        ).fetchone()  # fmt: skip
        return None if found is None else Claimed(Batch.model_validate_json(found[0]), found[1])

    def renew(self, runner: str, batch_id: str) -> bool:
        """Hold on to a batch; False where it is somebody else's by now."""
        until = self._clock() + LEASE_S
        text = "UPDATE batches SET leased_until = ? WHERE id = ? AND runner = ?"
        return self._run(text, until, batch_id, runner).rowcount == 1

    def release(self, runner: str, batch_id: str) -> None:
        """Let others run it at once."""
        self._run("UPDATE batches SET runner = NULL, leased_until = 0 WHERE id = ? AND runner = ?", batch_id, runner)

    # Results of lines, until they become files.

    def put_result(self, batch_id: str, line: int, record: dict[str, Any], *, failed: bool) -> None:
        """A line has its first result and no other."""
        text = json.dumps(record, ensure_ascii=False)
        self._run("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", batch_id, line, failed, text)

    def done(self, batch_id: str) -> set[int]:
        """Lines that have their result."""
        return {line for (line,) in self._run("SELECT line FROM results WHERE batch_id = ?", batch_id)}

    def counts(self, batch: Batch) -> RequestCounts:
        """By the results that there are."""
        text = "SELECT count(*), coalesce(sum(failed), 0) FROM results WHERE batch_id = ?"
        num_done, num_failed = self._one(text, batch.id)
        return RequestCounts(total=batch.request_counts.total, completed=num_done - num_failed, failed=num_failed)

    def _write_results(self, account: str, batch_id: str, *, failed: bool) -> str | None:
        """Those that failed, or the others, as a file in the order of the input; None where there are none."""
        path = self.new_path()
        text = "SELECT record FROM results WHERE batch_id = ? AND failed = ? ORDER BY line"
        if not _write_lines(path, (record for (record,) in self._run(text, batch_id, failed))):
            return None
        return self.add_file(account, path, f"{batch_id}_{'error' if failed else 'output'}.jsonl", "batch_output").id

    def _counted(self, batch: Batch) -> Batch:
        """With the results that there are now, which an ended batch has no more."""
        if batch.status in ENDED:
            return batch
        return batch.model_copy(update={"request_counts": self.counts(batch)})

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _behind(self, table: Literal["files", "batches"], account: str, page: Page) -> int:
        """Rows of the page have lower numbers, or higher ones where the oldest come first."""
        if page.after is None:
            return 0 if page.oldest_first else 2**62
        last = self._run(f"SELECT number FROM {table} WHERE id = ? AND account = ?", page.after, account).fetchone()
        if last is None:
            raise InvalidRequest(f"after names {page.after!r}, which is not in the list", param="after")
        number: int = last[0]
        return number

    def _one(self, text: str, *values: object) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._run(text, *values).fetchone()
        return row

    def _run(self, text: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(text, values)


def _write_lines(path: Path, lines: Iterable[str]) -> bool:
    """Whether there was a line; without any there is no file either."""
    written = False
    with path.open("x", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
            written = True
        file.flush()
        os.fsync(file.fileno())
    if not written:
        path.unlink()
    return written
