"""The responses that `--responses-store` keeps, with the items of their input and output, in SQLite.

The oldest responses are deleted when there are too many, they take too many bytes, or they are too old. A response
belongs to the API key that requested it; other keys cannot see it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, ObjectNotFound, ResponseNotFound
from serve_llm.server.metrics.meter import StoreUsage
from serve_llm.server.prompt.items import StoredItem
from serve_llm.server.storage.database import Connection, Database
from serve_llm.server.storage.page import Page

OPEN_STATUSES = ("queued", "in_progress")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    previous_id TEXT,
    is_background INTEGER NOT NULL,
    status TEXT NOT NULL,
    content BLOB NOT NULL,
    events BLOB,
    size INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS response_sizes ON responses (size);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    is_output INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (number, position)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS item_ids ON items (id);
"""


class StoredResponse(NamedTuple):
    """content: the JSON of the response."""

    id: str
    status: str
    is_background: bool
    content: bytes
    events: bytes | None  # events of its stream; None: they are not kept


class NewResponse(NamedTuple):
    """A response before its outcome is known."""

    id: str
    owner: str
    previous_id: str | None
    is_background: bool
    input_items: list[StoredItem]


class ResponseOutcome(NamedTuple):
    """The current state of a response. content: its JSON."""

    status: str
    content: bytes
    output_items: list[StoredItem]
    events: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.content) + len(self.events or b"") + _sum_sizes(self.output_items)


class ItemPage(NamedTuple):
    items: list[bytes]  # the JSON of each
    has_more: bool


class ResponseStore:
    """Methods with an owner see only that owner's responses. Methods raise StoreError."""

    def __init__(self, path: str, limits: Limits) -> None:
        """path: a file, or `database.MEMORY`. Raises OptionError."""
        self._database = Database(path, _SCHEMA, "responses-store")
        self._limits = limits
        self.usage = StoreUsage()
        self._database.run_here(_end_interrupted)
        self._database.run_here(self._measure)

    async def add(self, new: NewResponse, outcome: ResponseOutcome) -> bool:
        """Store a response. Returns False if it alone exceeds the limit on bytes."""
        created = time.time()
        size = outcome.size + _sum_sizes(new.input_items)
        if size > self._limits.stored_response_bytes:
            return False

        def insert(connection: Connection) -> None:
            values = (new.id, new.owner, created, new.previous_id, new.is_background)
            values += (outcome.status, outcome.content, outcome.events, size)  # type: ignore[assignment]
            cursor = connection.execute(
                "INSERT INTO responses (id, owner, created, previous_id, is_background, status, content, events, size)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            assert cursor.lastrowid is not None
            _insert_items(connection, cursor.lastrowid, new.input_items, 0, is_output=False)
            _insert_items(connection, cursor.lastrowid, outcome.output_items, len(new.input_items), is_output=True)
            self._evict(connection, created)

        await self._database.run(insert)
        return True

    async def update(self, response_id: str, outcome: ResponseOutcome) -> bool:
        """Replace the outcome of a response, unless it has been deleted. Returns False, and changes nothing, if the
        response alone exceeds the limit on bytes."""

        def change(connection: Connection) -> bool:
            row = connection.execute("SELECT number FROM responses WHERE id = ?", (response_id,)).fetchone()
            if row is None:
                return True
            (number,) = row
            (num_inputs, input_size) = connection.execute(
                "SELECT count(*), coalesce(sum(length(content)), 0) FROM items WHERE number = ? AND NOT is_output",
                (number,),
            ).fetchone()
            if outcome.size + input_size > self._limits.stored_response_bytes:
                return False
            connection.execute("DELETE FROM items WHERE number = ? AND is_output", (number,))
            connection.execute(
                "UPDATE responses SET status = ?, content = ?, events = ?, size = ? WHERE number = ?",
                (outcome.status, outcome.content, outcome.events, outcome.size + input_size, number),
            )
            _insert_items(connection, number, outcome.output_items, num_inputs, is_output=True)
            self._evict(connection, time.time())
            return True

        return await self._database.run(change)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ObjectNotFound."""

        def find(connection: Connection) -> StoredResponse | None:
            row = self._find_row(connection, "id, status, is_background, content, events", response_id, owner)
            return None if row is None else StoredResponse(row[0], row[1], bool(row[2]), row[3], row[4])

        found = await self._database.run(find)
        if found is None:
            raise _name_missing(response_id)
        return found

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises ObjectNotFound."""

        def remove(connection: Connection) -> int:
            self._evict(connection, time.time())
            found = connection.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            ).rowcount
            self._measure(connection)
            return found

        if not await self._database.run(remove):
            raise _name_missing(response_id)

    async def list_input_items(self, response_id: str, owner: str, page: Page) -> ItemPage:
        """Raises ObjectNotFound, InvalidRequest."""
        limit, is_ascending, after = page

        def find(connection: Connection) -> ItemPage | None:
            row = self._find_row(connection, "number", response_id, owner)
            if row is None:
                return None
            where = "number = ? AND NOT is_output"
            values = [row[0]]
            if after is not None:
                place = connection.execute(
                    f"SELECT position FROM items WHERE {where} AND id = ?", (row[0], after)
                ).fetchone()
                if place is None:
                    raise InvalidRequest(f"after: the response has no input item {after[:200]!r}", "after")
                where += " AND position > ?" if is_ascending else " AND position < ?"
                values.append(place[0])
            order = "ASC" if is_ascending else "DESC"
            rows = connection.execute(
                f"SELECT content FROM items WHERE {where} ORDER BY position {order} LIMIT ?", (*values, limit + 1)
            ).fetchall()
            return ItemPage([content for (content,) in rows[:limit]], len(rows) > limit)

        found = await self._database.run(find)
        if found is None:
            raise _name_missing(response_id)
        return found

    async def load_history(self, response_id: str, owner: str, limits: Limits) -> list[bytes]:
        """Load the items of the conversation that ends with this response, in order. Raises ResponseNotFound,
        InvalidRequest."""
        return await self._database.run(lambda connection: self._load_history(connection, response_id, owner, limits))

    async def find_items(self, item_ids: Sequence[str], owner: str) -> dict[str, bytes]:
        """Return the JSON of stored items, by id."""

        def find(connection: Connection) -> dict[str, bytes]:
            found = {}
            for item_id in dict.fromkeys(item_ids):
                row = connection.execute(
                    "SELECT items.content FROM items JOIN responses USING (number)"
                    " WHERE items.id = ? AND owner = ? AND created > ? ORDER BY number DESC LIMIT 1",
                    (item_id, owner, self._compute_horizon(time.time())),
                ).fetchone()
                if row is not None:
                    found[item_id] = row[0]
            return found

        return await self._database.run(find)

    def close(self) -> None:
        self._database.close()

    def _load_history(self, connection: Connection, response_id: str, owner: str, limits: Limits) -> list[bytes]:
        parts: list[list[bytes]] = []
        num_items = 0
        num_bytes = 0
        next_id: str | None = response_id
        while next_id is not None:
            row = self._find_row(connection, "number, status, previous_id", next_id, owner)
            if row is None:
                message = f"response {next_id[:200]!r} is not stored"
                if next_id != response_id:
                    message = (
                        f"response {next_id[:200]!r}, which {response_id[:200]!r} continues, was deleted or has left "
                        "the store: send the whole conversation as input. --limit stored-responses, "
                        "stored-response-bytes and stored-response-seconds say how much is stored"
                    )
                raise ResponseNotFound(message, "previous_response_id")
            number, status, previous_id = row
            if status in OPEN_STATUSES:
                raise InvalidRequest(f"response {next_id!r} is {status}: wait for its end", "previous_response_id")
            rows = connection.execute("SELECT content FROM items WHERE number = ? ORDER BY position", (number,))
            contents = [content for (content,) in rows]
            num_items += len(contents)
            num_bytes += sum(map(len, contents))
            if num_items > limits.messages or num_bytes > limits.body_bytes:
                raise InvalidRequest(
                    f"the conversation has more than {limits.messages} items or {limits.body_bytes} bytes",
                    "previous_response_id",
                )
            parts.append(contents)
            next_id = previous_id
        return [content for contents in reversed(parts) for content in contents]

    def _find_row(self, connection: Connection, columns: str, response_id: str, owner: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = connection.execute(
            f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND created > ?",
            (response_id, owner, self._compute_horizon(time.time())),
        ).fetchone()
        return row

    def _compute_horizon(self, now: float) -> float:
        return now - self._limits.stored_response_seconds

    def _evict(self, connection: Connection, now: float) -> None:
        """Delete the oldest responses until the others are within the limits."""
        expired = connection.execute("DELETE FROM responses WHERE created <= ?", (self._compute_horizon(now),))
        self.usage.num_evicted += expired.rowcount
        limits = self._limits
        count, size = self._measure(connection)
        oldest = connection.execute("SELECT number, size FROM responses ORDER BY number")
        doomed = []
        while count > limits.stored_responses or size > limits.stored_response_bytes:
            number, bytes_freed = oldest.fetchone()
            doomed.append((number,))
            count -= 1
            size -= bytes_freed
        connection.executemany("DELETE FROM responses WHERE number = ?", doomed)
        self.usage.num_evicted += len(doomed)
        self.usage.num_responses = count
        self.usage.num_bytes = size

    def _measure(self, connection: Connection) -> tuple[int, int]:
        """Count the responses and their bytes, and store both in `usage`."""
        count, size = connection.execute("SELECT count(*), coalesce(sum(size), 0) FROM responses").fetchone()
        self.usage.num_responses = count
        self.usage.num_bytes = size
        return count, size


def _end_interrupted(connection: sqlite3.Connection) -> None:
    """Mark responses as failed that were being generated when the last server was killed."""
    rows = connection.execute("SELECT number, content FROM responses WHERE status IN (?, ?)", OPEN_STATUSES).fetchall()
    for number, content in rows:
        response = json.loads(content)
        response["status"] = "failed"
        response["error"] = {"code": "server_error", "message": "the server was stopped before the response ended"}
        connection.execute(
            "UPDATE responses SET status = 'failed', content = ? WHERE number = ?",
            (json.dumps(response).encode(), number),
        )


def _insert_items(
    connection: Connection, number: int, items: Sequence[StoredItem], first_position: int, *, is_output: bool
) -> None:
    connection.executemany(
        "INSERT INTO items (number, position, id, is_output, content) VALUES (?, ?, ?, ?, ?)",
        [(number, position, item.id, is_output, item.content) for position, item in enumerate(items, first_position)],
    )


def _sum_sizes(items: Sequence[StoredItem]) -> int:
    return sum(len(item.content) for item in items)


def _name_missing(response_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"response {response_id[:200]!r} is not stored")
