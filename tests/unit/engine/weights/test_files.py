"""A checkpoint's files are mapped once, for as long as they are needed; released pages leave memory."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from serve_llm.engine.weights.files import Checkpoint
from support.forward import Harness, load
from support.matrix import mostly_slow
from support.tiny import make_checkpoint

SIZE = 8 << 20


def mapped(path: Path) -> list[int]:
    """Return the resident bytes of each mapping of the file in this process."""
    gc.collect()
    text = Path("/proc/self/smaps").read_text()
    regions = re.findall(rf"^[0-9a-f]+-[0-9a-f]+ .*{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", text, re.M)
    return [int(kilobytes) << 10 for kilobytes in regions]


def test_what_is_released_leaves_memory_and_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    numbers = torch.arange(SIZE // 4, dtype=torch.int32).view(2, -1)
    save_file({"a": numbers, "none": torch.empty(0, 3)}, path)
    checkpoint = Checkpoint(tmp_path)
    part = checkpoint.read("a", (range(1, 2), range(SIZE // 8)))
    assert torch.equal(checkpoint.read("a"), numbers)
    (before,) = mapped(path)
    checkpoint.release()
    (after,) = mapped(path)
    assert before >= SIZE and after <= SIZE // 4
    assert torch.equal(part, numbers[1:])
    del checkpoint, part
    assert mapped(path) == []


class Copy:
    """One tensor of a file, and the file, as from a reader that does not map files."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def keys(self) -> list[str]:
        return ["a"]

    def get_slice(self, name: str) -> Copy:
        return self

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        return self.numbers[ranges]


def test_memory_that_is_no_files_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    numbers = torch.arange(SIZE // 4)
    monkeypatch.setattr(safetensors, "safe_open", lambda path, framework: Copy(numbers[1024:-1024]))
    Checkpoint(tmp_path).release()
    assert torch.equal(numbers, torch.arange(SIZE // 4))


@pytest.mark.parametrize("tied", mostly_slow([False, True], [False]))
def test_only_an_embedding_that_fits_stays_in_the_file(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    path = tmp_path / "model.safetensors"
    assert next(iter(load_file(path).values())).dtype == torch.float32
    spec, decoder = load(tmp_path)
    expected = Harness(spec, decoder, torch.float32).logprobs([[3, 1, 4, 1, 5]])
    assert len(mapped(path)) == 1
    del decoder
    assert mapped(path) == []
    other = load(tmp_path, torch.bfloat16)
    assert mapped(path) == []
    del other
    again = Harness(*load(tmp_path), torch.float32).logprobs([[3, 1, 4, 1, 5]])
    assert torch.equal(again[0], expected[0])
