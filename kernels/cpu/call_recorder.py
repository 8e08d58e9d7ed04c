"""Records the kernels of a step, to repeat them without the Python code between them.

In a step of a few tokens, most kernels take microseconds, and the code that chooses them, allocates their results and
describes their tensors takes as long. A recorded step is a list of calls with their arguments. Repeating it reads and
writes the same memory, so its inputs must be written to where they were. Kernels that follow each other are repeated by
one call (repeat.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from serve_llm.kernels.cpu.recorded_operations import Call, RecordedOperations

aten = torch.ops.aten
ALLOCATIONS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)

Repeat = Callable[[Any, int], object]  # `serve_llm_repeat` in repeat.cpp


class RecordedCall(ctypes.Structure):
    """`RecordedCall` in repeat.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("integers", ctypes.c_int64 * 24),
        ("floats", ctypes.c_float * 2),
    )


class BufferPool:
    """The memory of results in recorded steps, of which only one is repeated at a time."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}  # by address

    def allocate(self, like: Tensor) -> Tensor:
        """Return a tensor of the same dtype, sizes and strides, in memory that no tensor uses any more."""
        num_bytes = like.untyped_storage().nbytes()
        free = (buffer for buffer in self._buffers.values() if len(buffer) >= num_bytes and not _is_used(buffer))
        buffer = min(free, key=len, default=None)
        if buffer is None:
            size = 1 << max(num_bytes - 1, 0).bit_length()  # fits steps of somewhat more tokens too
            buffer = torch.empty(size, dtype=torch.uint8)
            self._buffers[buffer.data_ptr()] = buffer
        return like.new_empty(0).set_(buffer.untyped_storage(), like.storage_offset(), like.size(), like.stride())

    def borrow(self, value: Any) -> Any:
        """Return the value; a tensor of the pool as another one at the same address, which does not keep its memory."""
        if not isinstance(value, Tensor):
            return value
        buffer = self._buffers.get(value.untyped_storage().data_ptr())
        if buffer is None:
            return value
        memory = (ctypes.c_uint8 * len(buffer)).from_address(buffer.data_ptr())
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return value.new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records torch's operations, and the kernels that are passed to `add`.

    Results get their memory from a pool. As in the step itself, later calls may overwrite a result that no tensor of
    the step holds any more."""

    def __init__(
        self, pool: BufferPool, repeat: Repeat | None = None, operations: RecordedOperations | None = None
    ) -> None:
        """repeat: repeats several kernels; None if this processor has none. operations: kernels to use instead of
        torch's operations."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self._operations = operations
        self._repeat = repeat
        self._calls: list[Call] = []
        self._joined: list[Call] | None = None  # the same calls, those of kernels joined
        self._kept: list[object] = []  # kernels read their memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that this mode does not guard against torch.compile. Otherwise it imports torch._dynamo when it
        first calls the mode: a second in which all streams wait, and more than 100 MB."""
        return False

    def add(self, kernel: Callable[..., object], arguments: Sequence[Any]) -> None:
        """Record a call that was made. Structures are copied, because their owners change them for later calls."""
        self._calls.append((kernel, tuple(_copy_structure(argument) for argument in arguments)))

    def keep(self, value: object) -> None:
        """Keep a value whose memory recorded kernels read, as long as this recorder."""
        self._kept.append(value)

    def __torch_dispatch__(
        self, operation: Any, types: object, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises RuntimeError for an operation whose result the step reads on the host, because it would be the same in
        all repetitions."""
        options = options or {}
        result = operation(*arguments, **options)
        if operation.overloadpacket in ALLOCATIONS:
            return self._pool.allocate(result)
        if operation._schema.is_mutable:
            self._record(partial(operation, **options), arguments)
        elif operation.overloadpacket is aten.lift_fresh:  # makes a constant
            self._kept.append(result)
        elif not all(isinstance(one, Tensor) for one in tree_leaves(result)):
            raise RuntimeError(f"{operation} reads back a value, so the step cannot be recorded")
        elif not _is_view(result, arguments):
            result = tree_map(self._move, result)
            found = None
            if self._operations is not None and isinstance(result, Tensor) and not options:
                found = self._operations.find(operation, arguments, result)
            if found is None:
                repeat = partial(_repeat, tree_map(self._pool.borrow, result), operation, options)
                self._record(repeat, arguments)
            else:
                self._calls.append(found)
                self.keep(tree_map(self._pool.borrow, arguments))
        return result

    def replay(self) -> None:
        """Repeat the calls."""
        if self._joined is None:
            self._joined = _join_kernels(self._calls, self._repeat)
        for call, arguments in self._joined:
            call(*arguments)

    def _record(self, call: Callable[..., object], arguments: Sequence[Any]) -> None:
        self._calls.append((call, tree_map(self._pool.borrow, arguments)))

    def _move(self, result: Tensor) -> Tensor:
        """Copy a result into the pool."""
        return self._pool.allocate(result).copy_(result)


def _is_used(buffer: Tensor) -> bool:
    """Whether there are tensors in the buffer's memory besides itself."""
    storage = buffer.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the buffer and `storage`


def _is_view(result: Any, arguments: Sequence[Any]) -> bool:
    """Whether the results of an operation are in the memory of its arguments, so that there is nothing to repeat."""
    results, given = ([one for one in tree_leaves(part) if isinstance(one, Tensor)] for part in (result, arguments))
    return {_find_memory(one) for one in results} <= {_find_memory(one) for one in given}


def _find_memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _repeat(result: Any, operation: Callable[..., Any], options: Mapping[str, Any], *arguments: Any) -> None:
    """Overwrite the result of an operation, a tensor or several, by that of another call."""
    for old, new in zip(tree_leaves(result), tree_leaves(operation(*arguments, **options)), strict=True):
        old.copy_(new)


def _join_kernels(calls: Sequence[Call], repeat: Repeat | None) -> list[Call]:
    """Replace kernels that follow each other by one call of `repeat`. The original arguments must be kept."""
    if repeat is None:
        return list(calls)
    joined: list[Call] = []
    described = [(call, _describe(*call)) for call in calls]
    for is_kernel, group in groupby(described, lambda one: one[1] is not None):
        if is_kernel:
            kernels = [kernel for _, kernel in group if kernel is not None]
            joined.append((repeat, ((RecordedCall * len(kernels))(*kernels), len(kernels))))
        else:
            joined += [call for call, _ in group]
    return joined


def _describe(kernel: Any, arguments: Sequence[Any]) -> RecordedCall | None:
    """Return the call in the form of repeat.cpp; None for an operation of torch, or for a kernel that takes more
    arguments than the form has."""
    types = getattr(kernel, "argtypes", None)
    if types is None:
        return None
    described = RecordedCall(ctypes.cast(kernel, ctypes.c_void_p).value)
    floats = [argument for one, argument in zip(types, arguments, strict=True) if one is ctypes.c_float]
    others = [
        _find_number(argument) for one, argument in zip(types, arguments, strict=True) if one is not ctypes.c_float
    ]
    if ctypes.c_double in types or len(floats) > len(described.floats) or len(others) > len(described.integers):
        return None
    described.floats[: len(floats)] = floats
    described.integers[: len(others)] = others
    return described


def _find_number(argument: Any) -> int:
    """Return an integer argument, or the address that it stands for."""
    if argument is None:
        return 0
    structure = getattr(argument, "_obj", None)
    return int(argument) if structure is None else ctypes.addressof(structure)


def _copy_structure(argument: Any) -> Any:
    structure = getattr(argument, "_obj", None)  # what `ctypes.byref` refers to
    return argument if structure is None else ctypes.byref(type(structure).from_buffer_copy(structure))
