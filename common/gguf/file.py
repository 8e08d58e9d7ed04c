"""Read the header of a GGUF file: its metadata and the offsets of its tensors. No torch.

The file is not trusted: every count and length is compared with the remaining bytes before memory is allocated for it.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from serve_llm.common.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
LONGEST_ARRAY = 1 << 24  # in entries; vocabularies have fewer
LONGEST_NAME = 1 << 16
MAX_DIMENSIONS = 4
LARGEST_DIMENSION = 1 << 40

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class StorageType:
    """How a tensor's numbers are stored: in blocks along a row."""

    name: str
    block: int  # numbers in a block
    block_bytes: int


STORAGE_TYPES = {
    0: StorageType("F32", 1, 4),
    1: StorageType("F16", 1, 2),
    2: StorageType("Q4_0", 32, 18),
    3: StorageType("Q4_1", 32, 20),
    6: StorageType("Q5_0", 32, 22),
    7: StorageType("Q5_1", 32, 24),
    8: StorageType("Q8_0", 32, 34),
    10: StorageType("Q2_K", 256, 84),
    11: StorageType("Q3_K", 256, 110),
    12: StorageType("Q4_K", 256, 144),
    13: StorageType("Q5_K", 256, 176),
    14: StorageType("Q6_K", 256, 210),
    16: StorageType("IQ2_XXS", 256, 66),
    17: StorageType("IQ2_XS", 256, 74),
    18: StorageType("IQ3_XXS", 256, 98),
    19: StorageType("IQ1_S", 256, 50),
    20: StorageType("IQ4_NL", 32, 18),
    21: StorageType("IQ3_S", 256, 110),
    22: StorageType("IQ2_S", 256, 82),
    23: StorageType("IQ4_XS", 256, 136),
    29: StorageType("IQ1_M", 256, 56),
    30: StorageType("BF16", 1, 2),
    39: StorageType("MXFP4", 32, 17),
}
OTHER_TYPES = {  # names for error messages
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True)
class StoredTensor:
    type: StorageType
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    start: int  # where its bytes begin in the file
    num_bytes: int
    part: int = 0  # which file, for a split model


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, object]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Raises ModelError that names the key or the tensor if the file is not a complete GGUF file of known types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(path, content).read()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise ModelError(f"{path} cannot be read: {error}") from None


class _Header:
    """A position in the file, and the name of what is being read, for errors."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._position = 0
        self._what = "the header"

    def read(self) -> GGUFFile:
        if self._take(len(MAGIC)) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            hint = "of big-endian byte order" if version >> 16 else f"of version {version}"
            raise ModelError(f"{self._path} is a GGUF file {hint}; versions 2 and 3 in little-endian order are read")
        num_tensors = self._count("number of tensors", min_bytes=24)
        num_keys = self._count("number of metadata keys", min_bytes=12)
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            self._what = f"the metadata key after {next(reversed(metadata), 'the header')}"
            key = self._text(LONGEST_NAME)
            self._what = f"metadata key {key}"
            if key in metadata:
                raise self._invalid("occurs twice")
            metadata[key] = self._value(self._number("I"))
        described: dict[str, tuple[StorageType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            self._what = f"the tensor after {next(reversed(described), 'the metadata')}"
            name = self._text(LONGEST_NAME)
            self._what = f"tensor {name}"
            if name in described:
                raise self._invalid("occurs twice")
            described[name] = self._describe_tensor()
        return GGUFFile(self._path, metadata, self._locate(described, _read_alignment(self._path, metadata)))

    def _describe_tensor(self) -> tuple[StorageType, tuple[int, ...], int]:
        """Type, shape and offset."""
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._invalid(f"has {num_dimensions} dimensions")
        sizes = tuple(self._number("Q") for _ in range(num_dimensions))
        if not all(1 <= size <= LARGEST_DIMENSION for size in sizes):
            raise self._invalid(f"has shape {list(reversed(sizes))}")
        number = self._number("I")
        if number not in STORAGE_TYPES:
            supported = ", ".join(one.name for one in STORAGE_TYPES.values())
            name = OTHER_TYPES.get(number, f"number {number}")
            raise self._invalid(f"is of type {name}, which is not supported (supported: {supported})")
        stored = STORAGE_TYPES[number]
        if sizes[0] % stored.block:
            raise self._invalid(f"has rows of {sizes[0]} numbers, which are not whole blocks of {stored.name}")
        return stored, tuple(reversed(sizes)), self._number("Q")

    def _locate(
        self, described: dict[str, tuple[StorageType, tuple[int, ...], int]], alignment: int
    ) -> dict[str, StoredTensor]:
        """Tensors with their position in the file. Offsets count from the first aligned byte after the header."""
        begin = -(-self._position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, (stored, shape, offset) in described.items():
            self._what = f"tensor {name}"
            num_bytes = math.prod(shape) // stored.block * stored.block_bytes
            if offset % alignment:
                raise self._invalid(f"has offset {offset}, which is not a multiple of general.alignment {alignment}")
            if begin + offset + num_bytes > len(self._content):
                raise self._invalid(
                    f"ends at byte {begin + offset + num_bytes} of {len(self._content)}: the file is cut short, or the "
                    f"offset {offset} is wrong"
                )
            tensors[name] = StoredTensor(stored, shape, begin + offset, num_bytes)
        return tensors

    def _value(self, kind: int, in_array: bool = False) -> object:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text(len(self._content))
        if kind != _ARRAY or in_array:
            raise self._invalid(f"has values of type {kind}, which is not known")
        inner = self._number("I")
        least = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
        count = self._count(f"{self._what}: number of entries", least)
        if count > LONGEST_ARRAY:
            raise self._invalid(f"has {count} entries")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        return [self._value(inner, in_array=True) for _ in range(count)]

    def _number(self, code: str) -> int:
        (number,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        found: int = number  # or a float or a bool, for metadata
        return found

    def _count(self, what: str, min_bytes: int) -> int:
        """Read a number of items. Raises ModelError if the rest of the file is too short for that many."""
        count = self._number("Q")
        if count * min_bytes > len(self._content) - self._position:
            raise ModelError(f"{self._path}: {what}: {count} do not fit in the file; is it cut short?")
        return count

    def _text(self, longest: int) -> str:
        length = self._number("Q")
        if length > longest:
            raise self._invalid(f"has a text of {length} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._invalid(f"is not UTF-8: {error}") from None

    def _take(self, count: int) -> bytes:
        taken = self._content[self._position : self._position + count]
        if len(taken) < count:
            raise ModelError(f"{self._path} ends amid {self._what}; was it cut short when it was copied?")
        self._position += count
        return taken

    def _invalid(self, why: str) -> ModelError:
        return ModelError(f"{self._path}: {self._what} {why}")


def _read_alignment(path: Path, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(f"{path}: metadata key general.alignment is {alignment!r}, but must be a power of 2 from 8 on")
    return alignment
