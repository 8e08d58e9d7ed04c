"""An SQLite database that one thread uses, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from serve_llm.common.errors import OptionError

T = TypeVar("T")
Connection = sqlite3.Connection

MEMORY = ":memory:"
APPLICATION_ID = 0x5E12E11  # marks the files of this program
VERSION = 1  # the schema's


class Database:
    """Opened by one server at a time. What was committed survives kill -9, but not always a loss of power."""

    def __init__(self, path: str | Path, schema: str, option: str) -> None:
        """path: a file, or MEMORY. schema: statements that create the tables where they are missing. Raises
        OptionError, which names `option`."""
        where = f"--{option} {path}"
        try:
            if path != MEMORY:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
            _open(self._connection, schema, where)
        except OSError as error:
            raise OptionError(f"{where}: {error.strerror}") from None
        except sqlite3.OperationalError as error:
            reason = "another server uses it" if "locked" in str(error) else str(error)
            raise OptionError(f"{where}: {reason}") from None
        except sqlite3.DatabaseError as error:
            raise OptionError(f"{where}: {error}") from None
        self._thread = ThreadPoolExecutor(1, "database")

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the thread, as one transaction."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_here, work)

    def run_here(self, work: Callable[[Connection], T]) -> T:
        """The same in the caller's thread, before the database is in use."""
        with self._connection:
            return work(self._connection)

    def close(self) -> None:
        """Finish what was begun. Idempotent."""
        self._thread.shutdown(wait=True)
        self._connection.close()


def _open(connection: Connection, schema: str, where: str) -> None:
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA foreign_keys = ON")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if num_tables and application != APPLICATION_ID:
        raise OptionError(f"{where}: it is a database of another program")
    if num_tables and version != VERSION:
        raise OptionError(f"{where}: another version of serve-llm wrote it (schema {version}, not {VERSION})")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.executescript(schema)
    connection.execute("BEGIN EXCLUSIVE")
    connection.commit()
