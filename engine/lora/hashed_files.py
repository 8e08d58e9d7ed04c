"""Read the two files of an adapter, and compute their digest. No torch.

The digest is the adapter's identity: a later load compares what it reads with the digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serve_llm.common.adapter_files import ADAPTER_CONFIG as CONFIG
from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.adapter_files import AdapterFiles
from serve_llm.common.errors import AdapterError


class FileContents(NamedTuple):
    """The contents of the two files."""

    config: bytes
    weights: memoryview


class HashedFiles:
    """Files that a thread reads and then hashes, while others use what it has read."""

    def __init__(self, threads: Executor, read: Callable[[], FileContents]) -> None:
        self._contents: Future[FileContents] = Future()
        self._digest = threads.submit(self._run, read)

    def _run(self, read: Callable[[], FileContents]) -> str:
        try:
            contents = read()
        except BaseException as error:
            self._contents.set_exception(error)
            raise
        self._contents.set_result(contents)
        return _join(contents.config, sha256(contents.weights).digest())  # releases the interpreter's lock

    @property
    def contents(self) -> FileContents:
        """Block until they are read. Raises the error of `read`."""
        return self._contents.result()

    @property
    def digest(self) -> str:
        """Block until it is computed."""
        return self._digest.result()


def read_files(
    directory: Path, max_config_bytes: int | None = None, max_weight_bytes: int | None = None
) -> AdapterFiles:
    """Raises AdapterError if the files cannot be read or are too large."""
    config = _read(directory / CONFIG, max_config_bytes)
    return AdapterFiles(config, _read(directory / WEIGHTS, max_weight_bytes))


def read_contents(directory: Path, max_config_bytes: int, max_weight_bytes: int) -> FileContents:
    """Read the files into memory that can be written to, as torch wants it. Raises AdapterError as `read_files`
    does."""
    config = _read(directory / CONFIG, max_config_bytes)
    path = directory / WEIGHTS
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(path, size, max_weight_bytes)
            weights = np.empty(size, np.uint8).data  # numpy asks for huge pages, which take fewer page faults
            filled = 0
            while count := file.readinto(weights[filled:]):
                filled += count
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    return FileContents(config, weights[:filled])


def compute_digest(directory: Path) -> str:
    """Compute the digest of the files as they are now. Raises AdapterError."""
    config = _read(directory / CONFIG)
    path = directory / WEIGHTS
    try:
        with path.open("rb") as file:
            return _join(config, file_digest(file, "sha256").digest())
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None


def compute_digest_of(files: AdapterFiles) -> str:
    """Compute the digest of files in memory."""
    return _join(files.config, sha256(files.weights).digest())


def _join(config: bytes, weights_digest: bytes) -> str:
    return sha256(sha256(config).digest() + weights_digest).hexdigest()


def _read(path: Path, most: int | None = None) -> bytes:
    try:
        if most is not None:
            _check_size(path, path.stat().st_size, most)
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None


def _check_size(path: Path, size: int, most: int) -> None:
    if size > most:
        raise AdapterError(f"{path} is larger than an adapter of --max-lora-rank can be: {most:,} bytes")
