"""Which changes of a checkpoint's files are noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.server.engines.checkpoint_stamp import CheckpointStamp

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_index(directory: Path, *names: str) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}}))


def expect_change(stamp: CheckpointStamp, name: str) -> None:
    with pytest.raises(ModelError, match=f"changed since the server started .{name}"):
        stamp.check()


@pytest.mark.parametrize("weights", [SINGLE, "model.gguf"])
def test_changed_weights_are_noticed_and_missing_or_other_files_are_not(tmp_path: Path, weights: str) -> None:
    target, config = tmp_path / "target", tmp_path / "config.json"
    for path in (target, config):
        path.write_bytes(b"old")
    (tmp_path / weights).symlink_to(target)
    stamp = CheckpointStamp(tmp_path)
    (tmp_path / "README.md").write_bytes(b"new")
    stamp.check()
    for path, name in ((target, weights), (config, config.name)):
        path.unlink()
        stamp.check()
        for content in (b"other", b"new"):
            path.write_bytes(content)
            os.utime(path, ns=(0, 0))
            expect_change(stamp, name)
        path.write_bytes(b"old")
        stamp.check()


def test_a_touch_is_no_change(tmp_path: Path) -> None:
    names = ("config.json", SINGLE)
    for name in names:
        (tmp_path / name).write_bytes(bytes(300_000))
    stamp = CheckpointStamp(tmp_path)
    for name in names:
        os.utime(tmp_path / name, ns=(1, 1))
    stamp.check()


@pytest.mark.parametrize("num_bytes", [100_000, 3_000_000])
def test_weights_of_the_same_size_and_header_are_noticed(tmp_path: Path, num_bytes: int) -> None:
    weights = tmp_path / SINGLE
    weights.write_bytes(bytes(70_000) + b"a" * num_bytes)
    stamp = CheckpointStamp(tmp_path)
    weights.write_bytes(bytes(70_000) + b"b" * num_bytes)
    os.utime(weights, ns=(1, 1))
    expect_change(stamp, SINGLE)


def test_weights_under_other_names_are_noticed(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"old")
    stamp = CheckpointStamp(tmp_path)
    (tmp_path / SINGLE).unlink()
    for part in PARTS:
        (tmp_path / part).write_bytes(b"new")
    expect_change(stamp, PARTS[0])
    write_index(tmp_path, *PARTS)
    expect_change(stamp, INDEX)
    stamp = CheckpointStamp(tmp_path)
    stamp.check()
    (tmp_path / SINGLE).write_bytes(b"old")
    expect_change(stamp, SINGLE)


def test_a_directory_behind_a_link_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    link = tmp_path / "current"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.safetensors").write_bytes(b"weights")
    link.symlink_to("first")
    stamp = CheckpointStamp(link)
    link.unlink()
    link.symlink_to("second")
    expect_change(stamp, "second.safetensors")


@pytest.mark.parametrize("indexed", [True, False])
def test_files_that_the_engine_does_not_read_are_no_change(tmp_path: Path, indexed: bool) -> None:
    names = ["adapter_model.safetensors", "consolidated.safetensors"]
    for part in PARTS:
        (tmp_path / part).write_bytes(b"weights")
    if indexed:
        write_index(tmp_path, *PARTS)
        names.append("unlisted.safetensors")
    stamp = CheckpointStamp(tmp_path)
    for content in (b"new", b"changed"):
        for name in names:
            (tmp_path / name).write_bytes(content)
        stamp.check()


@pytest.mark.parametrize("name", ["../other.safetensors", "..", "", "/", "a/b.safetensors", "nul\0.safetensors"])
def test_names_that_an_engine_refuses_are_not_read(tmp_path: Path, name: str) -> None:
    """The engine, which starts next, gives the error."""
    write_index(tmp_path, name, PARTS[0])
    (tmp_path / PARTS[0]).write_bytes(b"old")
    stamp = CheckpointStamp(tmp_path)
    (tmp_path / PARTS[0]).write_bytes(b"new!")
    expect_change(stamp, PARTS[0])
