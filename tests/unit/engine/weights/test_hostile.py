"""Malicious checkpoints: each gives one clear error, whatever its bytes are."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_json
from serve_llm.engine.weights.files import INDEX, SINGLE, Checkpoint


def write(path: Path, header: object, data: bytes = b"\0" * 64) -> None:
    """Write a safetensors file with any header."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 64, [16]), "b": tensor(32, 96, [16])},  # overlapping, past the end
        {"a": tensor(0, 64, [16]), "b": tensor(0, 64, [16])},  # the same bytes twice
        {"a": tensor(0, 64, [17])},  # a shape that does not match the bytes
        {"a": tensor(0, 64, [2**40, 2**40])},  # a shape that overflows
        {"a": tensor(64, 0, [16])},  # backwards
        {"a": tensor(0, 32, [8])},  # bytes that belong to no tensor
        {"a": tensor(0, 64, [16], "F99")},
        {"a": tensor(0, 64, [-16])},
        {"a": 3},
        [],
        b"not json",
        b"[" * 100_000,
    ],
    ids=str,
)
def test_a_header_that_lies_is_named(tmp_path: Path, header: object) -> None:
    write(tmp_path / SINGLE, header)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 2**63), struct.pack("<Q", 10**9) + b"{}"])
def test_a_file_that_is_cut_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "pytorch_model.bin", ""]
)
def test_an_index_names_files_of_its_own_directory_only(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for path in (tmp_path / "other.safetensors", directory / "sub" / "x.safetensors"):
        write(path, {"a": tensor(0, 64, [16])})
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="not a safetensors file of the same directory"):
        Checkpoint(directory)


def test_links_are_followed_and_what_they_lead_to_is_checked(tmp_path: Path) -> None:
    """The Hub's cache consists of links; a link to another file reveals nothing of it."""
    blobs, directory = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    directory.mkdir(parents=True)
    write(blobs / "0123", {"a": tensor(0, 64, [16])})
    (directory / "x.safetensors").symlink_to(blobs / "0123")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert Checkpoint(directory).shape("a") == (16,)
    (tmp_path / "secret").write_text('{"password": "tiger"}')
    for name in ("x.safetensors", INDEX):
        (directory / name).unlink()
        (directory / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ModelError, match=rf"{name} (cannot be read|is not an index)") as caught:
            Checkpoint(directory)
        assert "tiger" not in str(caught.value)
    (directory / INDEX).unlink()
    (directory / SINGLE).symlink_to(directory / SINGLE)  # to itself
    with pytest.raises(ModelError, match="contains neither"):
        Checkpoint(directory)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "[" * 100_000])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match="is not an index"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{", b"3"])
def test_a_configuration_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config.json (is not valid JSON|must hold a JSON object)"):
        read_json(tmp_path / "config.json")
