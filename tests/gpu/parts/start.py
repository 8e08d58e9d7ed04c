"""How long until the daemon answers, by phase: with random weights and nothing compiled yet, and with Triton's files on
the disk; and how fast weights come from a file that no memory holds.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.model import model_folder
from bench.start import start_seconds
from parts import common
from serve_llm.engine.hub import resolve_model

PIECE = 1 << 24  # bytes


def read_seconds(file: Path) -> float:
    """From the disk, as far as the system forgets what it is asked to forget."""
    forget(file)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.read(PIECE):
            pass
    return time.perf_counter() - began


def forget(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    here = common.place("start")
    words = [*here.words(), "--log-level=info"]  # which names the phases
    folder = here.folder(common.LLAMA_8B, "8b")
    with tempfile.TemporaryDirectory() as empty:
        for how, environ in (("nothing compiled yet", {"TRITON_CACHE_DIR": empty}), ("compiled before", {})):
            for name, seconds in start_seconds(folder, *words, **environ).items():
                aim = 15.0 if (how, name) == ("nothing compiled yet", "exec to first token") else None
                here.report.measured(f"8B, random weights, {how}: {name}", seconds, "s", aim=aim)
    stored = Path(resolve_model("demo")) if here.rehearse else model_folder()
    file = stored / "model.safetensors"
    read = read_seconds(file)
    forget(file)
    loaded = start_seconds(str(stored), *words, "--load-format=auto")["engine: weights packed"]
    here.report.measured("0.5B from a file: GB/s while it is loaded", file.stat().st_size / loaded / 1e9, "GB/s")
    here.report.measured("0.5B from a file: GB/s while it is only read", file.stat().st_size / read / 1e9, "GB/s")


if __name__ == "__main__":
    main()
