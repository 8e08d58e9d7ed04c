"""Triton kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for a GPU.

In the test processes, every kernel is interpreted (tests/conftest.py). `record` notes what a public function would
launch, for which meta tensors of any size are enough. `compile_for` compiles these launches in a separate process, in
which kernels are not interpreted, and reports which GPU resources the code needs.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SHARED_BYTES = 227 * 1024  # the maximum for one program on sm_90
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
NO_TRITON = "Triton is not installed; it is made for Linux on x86-64 alone"


@dataclass(frozen=True)
class Kernel:
    """A function under `triton.jit`, by name, so that another process can find it."""

    module: str
    name: str


@dataclass(frozen=True)
class Launch:
    """One kernel with the types of its arguments, as Triton would specialise it on a GPU."""

    kernel: Kernel
    signature: dict[str, str]  # argument -> type ("*bf16", "i32", "constexpr")
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16; pointers, in bytes
    options: dict[str, Any]  # num_warps, num_stages, ...


@dataclass(frozen=True)
class Resources:
    """The GPU resources that one compiled kernel needs."""

    launch: Launch
    shared_bytes: int
    registers: int  # of each thread
    stack_bytes: int  # of each thread; holds spilled registers
    ptx: str = field(repr=False)

    @property
    def has_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def has_mma(self) -> bool:
        return self.has_wgmma or "mma.sync" in self.ptx


def record(call: Callable[[], Any]) -> list[Launch]:
    """Record what `call` would launch, without running it: tensors may be on the meta device, and results are
    garbage."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _launch(self, args, kwargs)
        if launch not in launches:
            launches.append(launch)

    with mock.patch.object(InterpretedFunction, "run", run):
        call()
    return launches


def _launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    parameters = inspect.signature(function.fn).parameters
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    named = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(function.fn).bind(*args, **named)
    bound.apply_defaults()
    signature, constexprs, divisible = {}, {}, []
    as_they_come = set(function.kwargs.get("do_not_specialize") or ())
    unaligned = as_they_come.union(function.kwargs.get("do_not_specialize_on_alignment") or ())
    for name, value in bound.arguments.items():
        kind = "constexpr" if "constexpr" in str(parameters[name].annotation) else _type(value, name in as_they_come)
        signature[name] = kind
        if kind == "constexpr":
            constexprs[name] = Kernel(value.fn.__module__, value.fn.__name__) if hasattr(value, "fn") else value
        elif name not in unaligned and kind[0] in "*i" and (value.data_ptr() if kind[0] == "*" else value) % 16 == 0:
            divisible.append(name)
    return Launch(
        Kernel(function.fn.__module__, function.fn.__name__), signature, constexprs, tuple(divisible), options
    )


def _type(value: Any, as_it_comes: bool) -> str:
    """Apply the rule of Triton's own launcher: None becomes a constant, and so does 1 unless the kernel says
    otherwise."""
    if value is None or (type(value) is int and value == 1 and not as_it_comes):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise TypeError(f"an argument of type {type(value).__name__} for a Triton kernel")


def compiler_environment() -> dict[str, str]:
    """Return the variables of a process that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


def compile_for(launches: Iterable[Launch], capability: int = 90) -> list[Resources]:
    """Compile each of the launches for a GPU of the given compute capability (90: H100 and H200, 80: A100).

    Raises RuntimeError with the compiler's message.
    """
    launches = list(launches)
    script = Path(__file__).with_name("triton_compile.py")
    with tempfile.TemporaryDirectory() as folder:
        work, results = Path(folder, "work"), Path(folder, "results")
        work.write_bytes(pickle.dumps((launches, capability)))
        environment = compiler_environment() | {"TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-P", str(script), str(work), str(results)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows = pickle.loads(results.read_bytes())
    return [Resources(launch, *row) for launch, row in zip(launches, rows, strict=True)]


def assert_fits(found: Iterable[Resources], stack_bytes: int = 16) -> None:
    """Assert that each kernel can be launched on an H200 and spills at most the given bytes of registers."""
    for kernel in found:
        assert kernel.shared_bytes <= SHARED_BYTES, kernel
        assert kernel.stack_bytes <= stack_bytes, kernel
