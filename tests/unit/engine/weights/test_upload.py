"""Uploading weights to a device, with buffers that reveal when they are reused too early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.engine.weights import upload


class SlowBuffer:
    """Delays copies from it until it is requested again: its numbers must not change until then."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.log: list[str] = []

    def wait_until_free(self) -> Tensor:
        self.log.append("free")
        return self.memory

    def mark_copy_started(self) -> None:
        assert self.log[-1] == "free", "filled without a look at whether it is free"
        self.log.append("used")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(), (5,), (7, 33), (3, 5, 11), (0, 4), (4, 0)])
def test_whole_and_strided_tensors_arrive(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "BUFFER_BYTES", 300)  # so small that most tensors take several pieces
    buffers = [SlowBuffer(300), SlowBuffer(300)]
    put = upload.WeightUploader(torch.device("cpu"), buffers)
    tensor = torch.randint(-100, 100, shape).to(dtype)
    assert torch.equal(put(tensor), tensor)
    if tensor.dim() > 1:
        part = tensor[:, 1:].transpose(0, 1)
        found = put(part)
        assert torch.equal(found, part) and found.is_contiguous()
    uses = [buffer.log.count("used") for buffer in buffers]
    assert abs(uses[0] - uses[1]) <= 1, "they take turns"
    assert all(buffer.log.count("free") == buffer.log.count("used") for buffer in buffers)


def test_files_are_read_ahead_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(upload, "ADVICE_BYTES", 400)
    monkeypatch.setattr(upload.os, "posix_fadvise", lambda fd, start, size, advice: asked.append((start, size)))
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"x" * 10)
    upload.read_ahead([tmp_path / "a", tmp_path / "b"]).join(10)
    assert asked == [(0, 400), (400, 400), (800, 400), (0, 400)]
