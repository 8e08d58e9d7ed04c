"""Compile the kernels of a computation in several threads.

Triton compiles a kernel at its first launch, which blocks everything else. A model has dozens of kernels, and each
takes 0.1 to 2 seconds. Threads help because the compiler releases Python's lock for nine tenths of that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

UNFILLED = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


class ZeroFill(TorchFunctionMode):
    """Zero-fills tensors that torch would leave uninitialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in UNFILLED else found


@contextmanager
def compile_ahead(threads: int) -> Iterator[None]:
    """A context in which Triton's kernels are compiled by `threads` threads instead of launched. All are compiled on
    exit.

    The results of a computation inside are meaningless. A tensor that a kernel would write holds zeros, because torch
    may use it as an index. If a kernel cannot be compiled, its first launch tries again and raises the error.
    """
    functions: set[triton.JITFunction] = set()
    with ThreadPoolExecutor(threads) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), _without_launches(functions), ZeroFill():
            try:
                yield
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    _forget(functions)


@contextmanager
def _without_launches(functions: set[triton.JITFunction]) -> Iterator[None]:
    """functions: to which those are added that would have been launched."""
    run = triton.JITFunction.run

    def compile_only(kernel: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        functions.add(kernel)
        run(kernel, *args, grid=grid, warmup=True, **kwargs)

    triton.JITFunction.run = compile_only
    try:
        yield
    finally:
        triton.JITFunction.run = run


def _forget(functions: Iterable[triton.JITFunction]) -> None:
    """Leave kernels that failed to compile to their first launch."""
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, triton.FutureKernel):
                    del kernels[key]
