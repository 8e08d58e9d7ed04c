"""Shared by the parts of the GPU check: where they run, the models that they create, and how they measure time."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from floors import Chunks, Shape, floor_seconds
from report import Report

from bench.roofline import Limits
from serve_llm.common.hub import resolve_model
from serve_llm.engine.model.spec import ModelSpec


@dataclass(frozen=True)
class Place:
    """Where a part runs. rehearse: on a CPU with tiny models, only to see that the part works."""

    report: Report
    rehearse: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def sized(self, full: int, tiny: int) -> int:
        return tiny if self.rehearse else full

    def folder(self, shape: Shape) -> str:
        """Create a checkpoint without weights: config.json, and the demo model's tokenizer with a word for each further
        id, because a server sends no event for ids without text."""
        folder = Path(tempfile.gettempdir()) / f"serve-llm-gpu-check-{shape.name}{'-tiny' if self.rehearse else ''}"
        folder.mkdir(exist_ok=True)
        config = shape.config | (shape.tiny if self.rehearse else {})
        demo = Path(resolve_model("demo"))
        shutil.copy(demo / "tokenizer_config.json", folder)
        tokenizer = json.loads((demo / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        words |= {f"<{number}>": number for number in range(len(words), config["vocab_size"])}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def options(self) -> dict[str, object]:
        """Return the options of an engine for this place."""
        small = {"kv_cache_memory": "256MiB", "dtype": "bfloat16"} if self.rehearse else {}
        return {"device": self.device, "load_format": "dummy", "log_level": "warning", **small}

    def words(self) -> list[str]:
        """Return the same options as command-line arguments."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.options().items()]


def place(name: str) -> Place:
    """Read the place from the command line of a part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    return Place(Report(name, given.file), given.rehearse)


def seconds(call: Callable[[], object], repeats: int = 5, warm: int = 2) -> float:
    """Return the median seconds of this many synchronised calls."""
    times = []
    for number in range(warm + repeats):
        wait()
        began = time.perf_counter()
        call()
        wait()
        if number >= warm:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def limits(rehearse: bool) -> Limits:
    """Return the card's limits: the bandwidth of a copy, read and written; the rate of a bfloat16 matrix product of
    random numbers."""
    found = _limits("cpu", 1 << 20, 256) if rehearse else _limits("cuda", 1 << 32, 8192)
    torch.cuda.empty_cache()  # the engine, a separate process, needs the card's memory
    return found


def _limits(device: str, num_bytes: int, size: int) -> Limits:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn((size, size), device=device).bfloat16()
    copied = seconds(lambda: target.copy_(source))
    multiplied = seconds(lambda: square @ square)
    return Limits(2 * num_bytes / copied / 1e9, 2 * size**3 / multiplied / 1e9)


def tell_step(
    here: Place, name: str, took: float, spec: ModelSpec, chunks: Chunks, found: Limits, aim: float | None = None
) -> None:
    """Report a step's time, and its lower bound by bytes and operations as a share of that. took: seconds."""
    here.report.measured(name, took * 1000, "ms")
    here.report.measured(f"{name}: share of the floor", floor_seconds(spec, chunks, found) / took, aim=aim)
