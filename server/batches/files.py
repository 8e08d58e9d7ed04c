"""The input and output file of `serve-llm run-batch`. A later run resumes from the output."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from serve_llm.common.errors import OptionError, ServeError
from serve_llm.server.batches.lines import RESULT_PREFIX, BatchRequest, parse_request, parse_result
from serve_llm.server.http.errors import InvalidRequest

LINE_BYTES = 2**16  # limit on everything in a line except its body


def yield_gil() -> None:
    """Let another thread take the interpreter's lock if it waits for it. A thread that reads many lines would otherwise
    keep it for 5 ms at a time, and delay the event loop by as much at each of its steps."""
    time.sleep(0)


class InvalidLine(OptionError):
    """A line of the input is invalid. `reason` says why, without file and line, which is counted from 1. `code` names
    the reason in the API."""

    def __init__(self, reason: str, path: Path = Path(), number: int = 0, code: str = "invalid_line") -> None:
        super().__init__(f"{path}, line {number}: {reason}")
        self.reason = reason
        self.number = number
        self.code = code


class InvalidOutput(OptionError):
    """The output contains something other than results."""


class BatchInput:
    """A file with one request per line; empty lines and a byte order mark are skipped. Raises OptionError, and
    InvalidLine if a line is invalid."""

    def __init__(self, path: Path, max_body_bytes: int, endpoint: str | None = None) -> None:
        """endpoint: the `url` of every request; None: they may differ."""
        self._path = path
        self._endpoint = endpoint
        self._max_bytes = max_body_bytes + LINE_BYTES

    def read_ids(self) -> set[str]:
        """Check the whole file. Returns every custom_id."""
        ids = set[str]()
        for number, request in self._read_numbered():
            if request.custom_id in ids:
                reason = f"custom_id {request.custom_id!r} is not the first"
                raise InvalidLine(reason, self._path, number, "duplicate_custom_id")
            ids.add(request.custom_id)
        return ids

    def read(self, done: Collection[str]) -> Iterator[BatchRequest]:
        """Yield the requests whose custom_id is not in `done`."""
        for _, request in self._read_numbered():
            if request.custom_id not in done:
                yield request

    def _read_numbered(self) -> Iterator[tuple[int, BatchRequest]]:
        try:
            with self._path.open("rb") as file:
                number = 0
                while line := file.readline(self._max_bytes + 1):
                    number += 1
                    if len(line) > self._max_bytes:
                        raise InvalidLine(f"it is longer than {self._max_bytes} bytes", self._path, number)
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield number, self._parse(line, number)
                        yield_gil()
        except OSError as error:
            raise OptionError(f"--input-file {self._path}: {error.strerror}") from None

    def _parse(self, line: bytes, number: int) -> BatchRequest:
        try:
            request = parse_request(line)
        except InvalidRequest as error:
            code = "invalid_json_line" if error.param is None else "invalid_line"
            raise InvalidLine(error.message, self._path, number, code) from None
        if self._endpoint not in (None, request.url):
            reason = f"url must be that of the batch, {self._endpoint}"
            raise InvalidLine(reason, self._path, number, "url_mismatch")
        return request


class BatchOutput:
    """A file with one result per line, in the order in which requests end. It is locked until `close`, so that two runs
    cannot write to it at the same time."""

    def __init__(self, path: Path) -> None:
        """Raises OptionError if the file cannot be written, or another run writes to it."""
        self._path = path
        self._is_torn = False  # part of a line may have been written
        try:
            self._file = path.open("ab+")
        except OSError as error:
            raise OptionError(f"--output-file {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise OptionError(f"--output-file {path}: another run-batch writes to it") from None

    def read_ids(self, on_line: Callable[[bytes], None] | None = None) -> set[str]:
        """Return the custom_ids of all results. Removes an incomplete last line: its run was killed while writing it.
        on_line: is called with each line.

        Raises InvalidOutput, and changes nothing, if the file contains anything but results.
        """
        self._file.seek(0)
        ids = set[str]()
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._remove_tail(line)
                break
            try:
                ids.add(parse_result(line).custom_id)
            except InvalidRequest as error:
                raise InvalidOutput(f"--output-file {self._path}, line {number}: {error}") from None
            if on_line is not None:
                on_line(line)
            yield_gil()
        return ids

    def append(self, line: bytes) -> None:
        """Append a line. After an error, every call raises ServeError, because the last line may be incomplete."""
        if self._is_torn:
            raise ServeError(f"cannot write to {self._path} after an error")
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._is_torn = True
            raise ServeError(f"cannot write to {self._path}: {error.strerror}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `append` has reported it
            self._file.close()

    def _remove_tail(self, tail: bytes) -> None:
        if not tail.startswith(RESULT_PREFIX[: len(tail)]):
            raise InvalidOutput(f"--output-file {self._path}: its last line is not a result of a batch")
        self._file.seek(0, 2)
        self._file.truncate(self._file.tell() - len(tail))
