"""Compile the kernels of a computation in several threads.

Triton compiles a kernel at its first launch, while everything else waits. A model has dozens of kernels, and each takes
0.1 to 2 seconds. Threads help because the compiler releases Python's lock for nine tenths of that time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

UNFILLED = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


class ZeroFill(TorchFunctionMode):
    """Fills with zeros what torch would leave unfilled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in UNFILLED else found


@contextmanager
def compile_ahead(device: torch.device, threads: int) -> Iterator[None]:
    """Inside, Triton's kernels are compiled for the device by `threads` threads, and not launched. On exit all of them
    are compiled, and what launches them too.

    The results of a computation inside are meaningless. A tensor that a kernel would write holds zeros, because torch
    may use it as an index. If a kernel cannot be compiled or loaded, its first launch tries again and raises the error.
    """
    functions: set[triton.JITFunction] = set()
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        with mode, _without_launches(functions), ZeroFill():
            try:
                yield
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        compiled = [future.kernel for future in mode.future_kernels.values() if future.kernel is not None]
        # Not the same launcher by two threads. One would replace the file that the other one loads, and Python, which
        # knows modules by their files' numbers, might note the old number. If the next launcher's file gets that
        # number, Python takes it for this one.
        by_launcher = {_describe_launcher(kernel): kernel for kernel in compiled}
        loading = {pool.submit(_load, kernel): kernel for kernel in by_launcher.values()}
        wait(loading)
    _forget(functions, [kernel for future, kernel in loading.items() if future.exception() is not None])


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


def _forget(functions: Iterable[triton.JITFunction], failed: Sequence[triton.compiler.CompiledKernel]) -> None:
    """Let the first launch compile and load again what could not be compiled or loaded."""
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, triton.FutureKernel) or kernel in failed:
                    del kernels[key]


def _describe_launcher(kernel: triton.compiler.CompiledKernel) -> str:
    """Kernels with equal descriptions have the same launcher: one whose arguments have these types in C."""
    return re.sub(r"\*\w+", "*", str(list(kernel.src.signature.values())))


def _load(kernel: triton.compiler.CompiledKernel) -> None:
    """Load the kernel on the current device. Triton before 3.7 compiles its launcher, unless there is one on the
    disk."""
    kernel.run  # noqa: B018  a property
