"""Reads one pytorch_model*.bin and writes its tensors as safetensors. `command` runs it as a separate process.

This is the only place where a pickle is read: by torch.load(weights_only=True), which builds tensors and nothing else,
in a process that can neither reach the network nor start programs (`sandbox`).

Arguments: the file, the prefix of the output files' names, seconds. Writes to stdout one JSON object, file -> names of
its tensors with their bytes, or to stderr one line that says what is wrong (exit code 3).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from serve_llm.cli.convert.sandbox import SandboxError, restrict

FILE_BYTES = 2 << 30  # bytes of tensors per output file, unless one tensor is larger
SPARE_BYTES = 2 << 30  # memory for everything except tensors
DTYPES = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
)


class BinFileError(Exception):
    """What is wrong with the file."""


def main(path: Path, prefix: str, seconds: int) -> int:
    size = path.stat().st_size
    try:
        # The mapped file, one output file and its bytes; an old file is read instead of mapped.
        restrict(2 * size + 2 * min(size, FILE_BYTES) + SPARE_BYTES, seconds, size + (1 << 20))
        written = {}
        for number, tensors in enumerate(divide(read_tensors(path))):
            file = Path(f"{prefix}-{number:05}.safetensors")
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
            written[file.name] = {name: tensor.nbytes for name, tensor in tensors.items()}
    except (BinFileError, SandboxError) as error:
        sys.stderr.write(f"{error}\n")
        return 3
    except (MemoryError, RuntimeError) as error:
        sys.stderr.write(f"its tensors do not fit its size: {str(error).splitlines()[0]}\n")
        return 3
    sys.stdout.write(json.dumps(written))
    return 0


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU. Raises BinFileError."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"  # the format of torch 1.6 and later
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a damaged file may raise anything
        text = " ".join(str(error).split())
        if (refused := re.search(r"GLOBAL (\S+)", text)) is not None:
            raise BinFileError(f"it holds more than tensors: it asks for {refused[1]}, which is not run") from None
        raise BinFileError(f"it is damaged: {text.partition('. ')[0] or type(error).__name__}") from None
    if not isinstance(content, Mapping) or not content:
        raise BinFileError("it holds no tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise BinFileError(f"the entry {name!r} is not a named tensor: its type is {type(value).__name__}")
        if value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in DTYPES:
            raise BinFileError(f"{name} is a tensor of {value.dtype}, {value.layout}, which is not supported")
    tensors = {str(name): value.detach() for name, value in content.items()}
    if sum(tensor.nbytes for tensor in tensors.values()) > 2 * path.stat().st_size:
        raise BinFileError("its tensors take more than twice its size")
    return tensors


def divide(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of up to FILE_BYTES, in order."""
    group: dict[str, Tensor] = {}
    taken = 0
    for name, tensor in tensors.items():
        if group and taken + tensor.nbytes > FILE_BYTES:
            yield group
            group = {}
            taken = 0
        group[name] = tensor
        taken += tensor.nbytes
    yield group


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
