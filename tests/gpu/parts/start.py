"""The time until the daemon answers, by phase: with random weights and nothing compiled yet, and with Triton's files on
the disk; how much longer the first requests take than later ones; and how fast weights are read from a file that is not
in memory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from floors import LLAMA_8B

from bench.model import model_folder
from bench.start import start_seconds
from parts import common
from serve_llm.common.hub import resolve_model

PIECE = 1 << 24  # bytes
AIMS = {("cold", "exec to first token"): 15.0, ("cold", "first request over later ones"): 2.0}


def read_seconds(file: Path) -> float:
    """Read from the disk, as far as the system drops its cache when asked to."""
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


def starts(here: common.Place, words: list[str]) -> None:
    """Start twice, with the same folder for Triton's compiled kernels."""
    folder = here.folder(LLAMA_8B)
    with tempfile.TemporaryDirectory() as compiled:
        for how in ("cold", "warm"):
            found = start_seconds(folder, *words, TRITON_CACHE_DIR=compiled)
            for name, seconds in found.items():
                here.report.measured(f"8B, {how} start: {name}", seconds, "s", aim=AIMS.get((how, name)))
            name = "first request over later ones"
            ratio = found["first request once ready"] / found["later request"]
            here.report.measured(f"8B, {how} start: {name}", ratio, aim=AIMS.get((how, name)))


def weights_from_a_file(here: common.Place, words: list[str]) -> None:
    stored = Path(resolve_model("demo")) if here.rehearse else model_folder()
    file = stored / "model.safetensors"
    read = read_seconds(file)
    forget(file)
    loaded = start_seconds(str(stored), *words, "--load-format=auto")["engine: weights packed"]
    here.report.measured("0.5B from a file: GB/s while it is loaded", file.stat().st_size / loaded / 1e9, "GB/s")
    here.report.measured("0.5B from a file: GB/s while it is only read", file.stat().st_size / read / 1e9, "GB/s")


def main() -> None:
    here = common.place("start")
    words = [*here.words(), "--log-level=info"]  # logs the phases
    starts(here, words)
    weights_from_a_file(here, words)


if __name__ == "__main__":
    main()
