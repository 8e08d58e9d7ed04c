"""Detects that the files of a checkpoint have changed since the engines loaded them. Otherwise, an engine that replaces
another would continue open requests with a different model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.checkpoint import list_links
from serve_llm.common.hub import read_json
from serve_llm.common.weight_files import INDEX, SINGLE, is_weight_file, list_unlisted_files

HEAD_BYTES = 65_536  # a whole config.json, and most headers of safetensors files
PAGE_BYTES = 4_096
NUM_PAGES = 16  # evenly spaced over each file; two models with the same header have other numbers there


class _FileStamp(NamedTuple):
    num_bytes: int
    modified_ns: int
    digest: bytes  # SHA-256 of the head and the pages


class CheckpointStamp:
    """The files that engines read, as they were when it was created.

    A file has changed if its size differs, or if its time of modification and its digest do; so a file that was only
    touched or copied again has not. A change that keeps size and time is not noticed, nor one outside the head and the
    pages, such as an edit of a few weights.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stamps = {path: _read_stamp(path) for path in _list_files(directory)}

    def check(self) -> None:
        """Raises ModelError if a file has changed or was added. A missing file is no change: it may come back, and as
        long as it is missing, no engine can start."""
        for path in _list_files(self._directory):
            known = self._stamps.get(path)
            found = _read_stamp(path, known)
            if found is None:
                continue
            if known is None or (found.num_bytes, found.digest) != (known.num_bytes, known.digest):
                raise ModelError(
                    f"the checkpoint has changed since the server started ({path.name}), so a new engine would serve "
                    "another model; restart the server to serve it"
                )
            self._stamps[path] = found


def _list_files(directory: Path) -> list[Path]:
    """config.json and the files of weights, in the order in which the engine looks for them."""
    return [directory / "config.json", *_list_weights(directory)]


def _list_weights(directory: Path) -> list[Path]:
    if links := list_links(directory):
        return links
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return [directory / INDEX, *_list_parts(directory / INDEX)]
    return list_unlisted_files(directory)


def _list_parts(index: Path) -> list[Path]:
    """The files that the index names. An engine refuses an index that cannot be read or that names other files."""
    try:
        names = read_json(index).get("weight_map")
    except ModelError:
        return []
    if not isinstance(names, dict):
        return []
    parts = {str(name) for name in names.values()}
    return [index.with_name(name) for name in sorted(parts) if is_weight_file(name)]


def _read_stamp(path: Path, known: _FileStamp | None = None) -> _FileStamp | None:
    """None: there is no such file, or it cannot be read. known: its earlier stamp, returned unless size or time have
    changed."""
    try:
        stat = path.stat()
        if known is not None and (stat.st_size, stat.st_mtime_ns) == known[:2]:
            return known
        return _FileStamp(stat.st_size, stat.st_mtime_ns, _read_digest(path, stat.st_size))
    except OSError:
        return None


def _read_digest(path: Path, num_bytes: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        digest.update(file.read(HEAD_BYTES))
        for page in range(1, NUM_PAGES + 1):
            offset = max(0, num_bytes - PAGE_BYTES) * page // NUM_PAGES
            digest.update(os.pread(file.fileno(), PAGE_BYTES, offset))
    return digest.digest()
