"""Which changes of a checkpoint's files are noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.server.engines.checkpoint_stamp import CheckpointStamp


def test_changed_weights_are_noticed_and_missing_or_other_files_are_not(tmp_path: Path) -> None:
    weights, config, link = tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "model.gguf"
    target = tmp_path / "target"
    for path in (weights, config, target):
        path.write_bytes(b"old")
    link.symlink_to(target)
    stamp = CheckpointStamp(tmp_path)
    (tmp_path / "README.md").write_bytes(b"new")
    stamp.check()
    for path, name in ((weights, weights.name), (config, config.name), (target, link.name)):
        stat = path.stat()
        path.unlink()
        stamp.check()
        path.write_bytes(b"other")
        with pytest.raises(ModelError, match=f"changed since the server started .{name}"):
            stamp.check()
        path.write_bytes(b"old")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        stamp.check()
