"""An SQLite database used by a single thread, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from serve_llm.common.errors import OptionError
from serve_llm.server.http.errors import StoreError, StoreFull
from serve_llm.server.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

T = TypeVar("T")
Connection = sqlite3.Connection

MEMORY = ":memory:"
APPLICATION_ID = 0x5E12E11  # identifies files of this program
VERSION = 1  # version of the schema
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_DISK_FAILURES = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")  # begin SQLite's names of errors


class Database:
    """Can be opened by one server at a time. Committed data survives kill -9, but not always a loss of power."""

    def __init__(self, path: str | Path, schema: str, option: str) -> None:
        """path: a file, or MEMORY. schema: statements that create missing tables. Raises OptionError, which names
        `option`."""
        where = f"--{option} {path}"
        self._option = option
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
        self._thread = ThreadPool(1, "database")

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the thread, as one transaction. Raises StoreError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_here, work)
        except (sqlite3.Error, OSError) as error:
            # A full or failing disk is no bug, so its line needs no traceback.
            logger.error("--%s failed: %s", self._option, error, exc_info=not _is_disk_failure(error))
            raise describe_failure(f"the store of --{self._option}", error) from None

    def run_here(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the caller's thread, before the database is in use."""
        with self._connection:
            return work(self._connection)

    def close(self) -> None:
        """Finish pending work. Idempotent."""
        self._thread.shutdown(wait=True)
        self._connection.close()


def _is_disk_failure(error: sqlite3.Error | OSError) -> bool:
    return isinstance(error, OSError) or getattr(error, "sqlite_errorname", "").startswith(_DISK_FAILURES)


def describe_failure(store: str, error: sqlite3.Error | OSError) -> StoreError:
    """Return the message for clients. Paths stay in the server's log."""
    if isinstance(error, OSError):
        is_full = error.errno in _NO_SPACE
        reason = error.strerror or type(error).__name__
    else:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        reason = str(error)
    kind = StoreFull if is_full else StoreError
    return kind(f"{store} cannot be used: {reason}")


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
