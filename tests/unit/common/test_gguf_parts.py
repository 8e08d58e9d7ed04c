"""Models in several GGUF files: parts that do not belong together are named."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.parts import list_parts, read_parts


def write(path: Path, tensor: str = "", **numbers: int) -> Path:
    """Write a file with one tensor, "TENSOR.weight". numbers: values of "split." keys, with "_" for "."."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in numbers.items():
        writer.add_uint32(f"split.{key.replace('_', '.')}", value)
    writer.add_tensor(f"{tensor or path.stem}.weight", np.full((2, 32), len(tensor), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path) -> list[Path]:
    names = [folder / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    write(names[0], "one", no=0, count=2, tensors_count=2)
    write(names[1], "two", no=1, count=2, tensors_count=2)
    return names


def test_parts_are_one_file(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert [list_parts(part) for part in parts] == [parts, parts]
    whole = read_parts(parts)
    assert whole.path == parts[0] and whole.metadata["split.no"] == 0
    assert {name: tensor.part for name, tensor in whole.tensors.items()} == {"one.weight": 0, "two.weight": 1}


@pytest.mark.parametrize("name", ["a.gguf", "a-00001-of-00000.gguf", "a-1-of-2.gguf", "a-00001-of-00002.bin"])
def test_names_of_whole_files(name: str, tmp_path: Path) -> None:
    assert list_parts(tmp_path / name) == [tmp_path / name]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[0].unlink()
    with pytest.raises(
        ModelError, match=re.escape(f"{parts[1]} is one of 2 parts, and {tmp_path} lacks {parts[0].name}")
    ):
        list_parts(parts[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no": 0, "count": 2}, "split.no is 0, but by the names of the files it must be 1"),
        ({"no": 1, "count": 3}, "split.count is 3, but by the names of the files it must be 2"),
        ({"no": 1}, "split.count is missing, but by the names of the files it must be 2"),
    ],
)
def test_a_part_of_another_model(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    write(parts[1], "two", **changes)
    with pytest.raises(ModelError, match=re.escape(f"{parts[1]}: metadata key {message}")):
        read_parts(parts)


def test_tensors_of_parts(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    write(parts[1], "one", no=1, count=2)
    with pytest.raises(ModelError, match=r"00002\.gguf: tensor one\.weight is in a-00001-of-00002\.gguf as well"):
        read_parts(parts)
    write_parts(tmp_path)
    write(parts[0], "one", no=0, count=2, tensors_count=3)
    with pytest.raises(ModelError, match=r"metadata key split\.tensors\.count is 3, but the files have 2 tensors"):
        read_parts(parts)


def test_one_part_without_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "renamed.gguf", "two", no=1, count=2)
    with pytest.raises(ModelError, match=r"renamed\.gguf: metadata key split\.count is 2, but .* must be 1"):
        read_parts(list_parts(path))
