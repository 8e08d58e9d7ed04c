"""Notice that the files of the checkpoint are no longer those that the engines have loaded. A replaced engine would
otherwise continue open requests with another model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from serve_llm.common.errors import ModelError

PATTERNS = ("config.json", "*.safetensors", "*.gguf")


class _FileStamp(NamedTuple):
    num_bytes: int
    modified_ns: int


class CheckpointStamp:
    """Sizes and times of the files when it was created."""

    def __init__(self, directory: Path) -> None:
        self._stamps = {path: _read_stamp(path) for pattern in PATTERNS for path in sorted(directory.glob(pattern))}

    def check(self) -> None:
        """Raises ModelError if a file has changed. A missing file is no change: it may come back, and as long as it is
        missing, no engine can start."""
        for path, stamp in self._stamps.items():
            found = _read_stamp(path)
            if stamp is not None and found not in (None, stamp):
                raise ModelError(
                    f"the checkpoint has changed since the server started ({path.name}), so a new engine would serve "
                    "another model; restart the server to serve it"
                )


def _read_stamp(path: Path) -> _FileStamp | None:
    """None: there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return _FileStamp(stat.st_size, stat.st_mtime_ns)
