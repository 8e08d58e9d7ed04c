"""A model split into several GGUF files, as llama-gguf-split writes them: name-00001-of-00003.gguf and so on.

Each file is a complete GGUF file; the first has the metadata, and each has some of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.file import GGUFFile, StoredTensor, read_gguf

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 9999


def list_parts(path: Path) -> list[Path]:
    """The files of the model to which a file belongs, according to its name; the file alone if it is not a part. Raises
    ModelError if one is missing."""
    match = _NAME.fullmatch(path.name)
    count = int(match["count"]) if match is not None else 1
    if match is None or not 1 <= count <= MAX_PARTS:
        return [path]
    paths = [path.with_name(name_part(match["stem"], number, count)) for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelError(f"{path} is one of {count} parts, and {path.parent} lacks {', '.join(missing[:5])}")
    return paths


def name_part(stem: str, number: int, count: int) -> str:
    """number: counted from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def read_parts(paths: Sequence[Path]) -> GGUFFile:
    """The first file's metadata and the tensors of all files. Raises ModelError if they are not the parts of one model
    in order, or if one cannot be read."""
    files = [read_gguf(path) for path in paths]
    tensors: dict[str, StoredTensor] = {}
    for index, file in enumerate(files):
        _check_place(file, index, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(f"{file.path}: tensor {name} is in {files[tensors[name].part].path.name} as well")
            tensors[name] = replace(tensor, part=index)
    stated = files[0].metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelError(
            f"{files[0].path}: metadata key split.tensors.count is {stated}, but the files have {len(tensors)} tensors"
        )
    return GGUFFile(files[0].path, files[0].metadata, tensors)


def _check_place(file: GGUFFile, index: int, count: int) -> None:
    """Raise ModelError unless the metadata say that the file is part `index`, counted from 0, of `count`."""
    if count == 1 and file.metadata.get("split.count", 0) in (0, 1):
        return
    for key, expected in (("split.count", count), ("split.no", index)):
        value = file.metadata.get(key)
        if value != expected:
            raise ModelError(
                f"{file.path}: metadata key {key} is {'missing' if value is None else value}, but by the names of the "
                f"files it must be {expected}; parts of one model are named name-00001-of-00003.gguf and so on"
            )
