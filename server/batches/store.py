"""The directory `--batches-dir`: files, and a database of their owners and of the batches.

A file belongs to the API key that sent it; other keys cannot see it. The result files of a batch are written in place
under ids derived from the batch's id, and are listed once the batch has ended. An expired file is removed before the
next operation on files, but the input of a batch only after the batch has ended.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from serve_llm.common.errors import OptionError
from serve_llm.common.options.limits import Limits
from serve_llm.server.batches.objects import OPEN_STATUSES, StoredBatch, StoredFile
from serve_llm.server.http.errors import InvalidRequest, ObjectNotFound, TooLarge, Unavailable
from serve_llm.server.storage.database import Connection, Database
from serve_llm.server.storage.page import Page

T = TypeVar("T", bound=msgspec.Struct)
Result = TypeVar("Result")

MAX_NAME_CHARACTERS = 255

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batch_statuses ON batches (status);
CREATE INDEX IF NOT EXISTS file_owners ON files (owner, size);
CREATE TABLE IF NOT EXISTS file_expiries (
    file_id TEXT PRIMARY KEY REFERENCES files (id) ON DELETE CASCADE,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS file_expiry_times ON file_expiries (expires_at);
"""
_OPEN = f"status IN ({', '.join(repr(status) for status in OPEN_STATUSES)})"

_EXPIRED = f"""
SELECT file_id FROM file_expiries
WHERE expires_at <= ? AND file_id NOT IN (SELECT input_file_id FROM batches WHERE {_OPEN})
"""
_SINGULAR = {"files": "file", "batches": "batch"}


class BatchPaths(NamedTuple):
    input: Path
    output: Path
    errors: Path


class ObjectPage(NamedTuple):
    objects: list[bytes]  # the JSON of each
    has_more: bool


class BatchStore:
    """Methods with an owner see only that owner's objects. Methods raise StoreError."""

    def __init__(self, directory: str, limits: Limits) -> None:
        """Raises OptionError."""
        self._limits = limits
        self._folder = Path(directory)
        self._files = self._folder / "files"
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--batches-dir {directory}: {error.strerror}") from None
        self._database = Database(self._folder / "batches.db", _SCHEMA, "batches-dir")
        self._database.run_here(self._remove_unknown_files)

    async def add_file(self, owner: str, filename: str, source: BinaryIO, lifetime: int | None = None) -> StoredFile:
        """Copy an upload. lifetime: in seconds; None: until it is deleted. Raises TooLarge."""
        source.seek(0, os.SEEK_END)
        now = int(time.time())
        file = StoredFile(
            id=f"file-{uuid.uuid4().hex}",
            bytes=source.tell(),
            created_at=now,
            filename=filename[:MAX_NAME_CHARACTERS],
            purpose="batch",
            expires_at=None if lifetime is None else now + lifetime,
        )
        source.seek(0)

        def insert(connection: Connection) -> None:
            count, size = connection.execute(
                "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE owner = ?", (owner,)
            ).fetchone()
            if count >= self._limits.stored_files or size + file.bytes > self._limits.all_file_bytes:
                raise TooLarge(f"{count} files of {size} bytes are stored, and there is no room for more: delete some")
            path = self._files / file.id
            try:
                with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as target:
                    shutil.copyfileobj(source, target, 2**20)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            self._insert_file(connection, owner, file)

        await self._run(insert)
        return file

    async def remove_expired(self) -> None:
        await self._run(lambda _: None)

    async def get_file(self, file_id: str, owner: str) -> StoredFile:
        """Raises ObjectNotFound."""
        return await self._get("files", StoredFile, file_id, owner)

    async def find_content(self, file_id: str, owner: str) -> Path:
        """Raises ObjectNotFound."""
        file = await self.get_file(file_id, owner)
        path = self._files / file.id
        await self._database.run(lambda _: path.stat())
        return path

    async def delete_file(self, file_id: str, owner: str) -> None:
        """Raises ObjectNotFound, InvalidRequest."""

        def remove(connection: Connection) -> None:
            _find_content(connection, "files", file_id, owner)
            user = connection.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND {_OPEN}", (file_id,)
            ).fetchone()
            if user is not None:
                raise InvalidRequest(f"the file is the input of {user[0]}, which has not ended", "file_id")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._run(remove)
        await self._database.run(lambda _: (self._files / file_id).unlink(missing_ok=True))

    async def list_files(self, owner: str, page: Page, purpose: str | None) -> ObjectPage:
        """Raises InvalidRequest."""
        where, values = ("purpose = ?", [purpose]) if purpose is not None else ("TRUE", [])
        return await self._run(lambda connection: _list(connection, "files", owner, page, where, values))

    async def add_batch(self, owner: str, batch: StoredBatch) -> None:
        """Raises ObjectNotFound, InvalidRequest, Unavailable."""

        def insert(connection: Connection) -> None:
            file = msgspec.json.decode(
                _find_content(connection, "files", batch.input_file_id, owner, "input_file_id"), type=StoredFile
            )
            if file.purpose != "batch":
                raise InvalidRequest("input_file_id: a result file cannot be an input", "input_file_id")
            (count,) = connection.execute("SELECT count(*) FROM batches WHERE owner = ?", (owner,)).fetchone()
            if count >= self._limits.stored_batches:
                ended = connection.execute(
                    f"SELECT id FROM batches WHERE owner = ? AND NOT {_OPEN} ORDER BY number", (owner,)
                ).fetchone()
                if ended is None:
                    raise Unavailable(f"{count} batches have not ended")
                connection.execute("DELETE FROM batches WHERE id = ?", ended)
            connection.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, content) VALUES (?, ?, ?, ?, ?)",
                (batch.id, owner, batch.status, batch.input_file_id, msgspec.json.encode(batch)),
            )

        await self._run(insert)

    async def get_batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Raises ObjectNotFound."""
        return await self._get("batches", StoredBatch, batch_id, owner)

    async def list_batches(self, owner: str, page: Page) -> ObjectPage:
        """Raises InvalidRequest."""
        return await self._database.run(lambda connection: _list(connection, "batches", owner, page, "TRUE", []))

    async def find_open(self) -> list[tuple[str, str]]:
        """Return the id and owner of each batch that has not ended, oldest first."""
        return await self._database.run(
            lambda connection: connection.execute(
                f"SELECT id, owner FROM batches WHERE {_OPEN} ORDER BY number"
            ).fetchall()
        )

    async def change_batch(self, batch_id: str, change: Callable[[StoredBatch], None]) -> StoredBatch:
        """Apply `change` to the stored batch. When the batch ends, its result files are listed."""

        def update(connection: Connection) -> StoredBatch:
            owner, content = connection.execute(
                "SELECT owner, content FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            batch = msgspec.json.decode(content, type=StoredBatch)
            change(batch)
            if not batch.is_open:
                self._list_results(connection, owner, batch)
            connection.execute(
                "UPDATE batches SET status = ?, content = ? WHERE id = ?",
                (batch.status, msgspec.json.encode(batch), batch_id),
            )
            return batch

        return await self._database.run(update)

    def find_paths(self, batch: StoredBatch) -> BatchPaths:
        output, errors = (self._files / file_id for file_id in _name_results(batch.id))
        return BatchPaths(self._files / batch.input_file_id, output, errors)

    def close(self) -> None:
        self._database.close()

    async def _get(self, table: str, kind: type[T], object_id: str, owner: str) -> T:
        content = await self._run(lambda connection: _find_content(connection, table, object_id, owner))
        return msgspec.json.decode(content, type=kind)

    async def _run(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` after removing expired files."""

        def run(connection: Connection) -> Result:
            rows = connection.execute(_EXPIRED, (int(time.time()),)).fetchall()
            for (file_id,) in rows:
                (self._files / file_id).unlink(missing_ok=True)
            connection.executemany("DELETE FROM files WHERE id = ?", rows)
            return work(connection)

        return await self._database.run(run)

    def _list_results(self, connection: Connection, owner: str, batch: StoredBatch) -> None:
        output, errors = _name_results(batch.id)
        for file_id, name in ((output, "output"), (errors, "error")):
            path = self._files / file_id
            if not path.exists() or path.stat().st_size == 0:
                path.unlink(missing_ok=True)
                continue
            file = StoredFile(
                id=file_id,
                bytes=path.stat().st_size,
                created_at=int(time.time()),
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
            )
            if batch.output_expires_after is not None:
                file.expires_at = file.created_at + batch.output_expires_after.seconds
            self._insert_file(connection, owner, file)
            setattr(batch, f"{name}_file_id", file_id)

    def _insert_file(self, connection: Connection, owner: str, file: StoredFile) -> None:
        connection.execute(
            "INSERT INTO files (id, owner, purpose, size, content) VALUES (?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.bytes, msgspec.json.encode(file)),
        )
        if file.expires_at is not None:
            connection.execute("INSERT INTO file_expiries VALUES (?, ?)", (file.id, file.expires_at))

    def _remove_unknown_files(self, connection: Connection) -> None:
        """Remove what an interrupted upload or deletion has left behind."""
        known = {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
        for (batch_id,) in connection.execute(f"SELECT id FROM batches WHERE {_OPEN}"):
            known.update(_name_results(batch_id))
        for path in self._files.iterdir():
            if path.name not in known and path.name.startswith("file-"):
                path.unlink()


def _name_results(batch_id: str) -> tuple[str, str]:
    """Return the ids of a batch's output and error files."""
    name = batch_id.removeprefix("batch_")
    return f"file-{name}-output", f"file-{name}-error"


def _find_content(connection: Connection, table: str, object_id: str, owner: str, param: str | None = None) -> bytes:
    """Raises ObjectNotFound."""
    row = connection.execute(f"SELECT content FROM {table} WHERE id = ? AND owner = ?", (object_id, owner)).fetchone()
    if row is None:
        raise ObjectNotFound(f"there is no {_SINGULAR[table]} {object_id[:200]!r}", param)
    content: bytes = row[0]
    return content


def _list(connection: Connection, table: str, owner: str, page: Page, where: str, values: list[str]) -> ObjectPage:
    """Raises InvalidRequest."""
    clauses = [where, "owner = ?"]
    parameters = [*values, owner]
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if row is None:
            raise InvalidRequest(f"after: there is no {page.after[:200]!r}", "after")
        clauses.append("number > ?" if page.is_ascending else "number < ?")
        parameters.append(row[0])
    order = "ASC" if page.is_ascending else "DESC"
    rows = connection.execute(
        f"SELECT content FROM {table} WHERE {' AND '.join(clauses)} ORDER BY number {order} LIMIT ?",
        (*parameters, page.limit + 1),
    ).fetchall()
    return ObjectPage([content for (content,) in rows[: page.limit]], len(rows) > page.limit)
