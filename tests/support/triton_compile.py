"""Compiles kernels for a GPU that need not be present; `support.triton.compile_for` starts it as a separate process.

Arguments: a pickle file with what to compile (launches, capability), and the file for the results.
"""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from support.triton import Kernel, Launch


def resolve(value: Any) -> Any:
    return getattr(importlib.import_module(value.module), value.name) if isinstance(value, Kernel) else value


def compiled(launch: Launch, capability: int) -> tuple[int, int, int, str]:
    """Return bytes of shared memory, registers and stack bytes per thread, and the PTX."""
    function = resolve(launch.kernel)
    source = ASTSource(
        fn=function,
        signature=launch.signature,
        constexprs={name: resolve(value) for name, value in launch.constexprs.items()},
        attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return kernel.metadata.shared, registers, stack, kernel.asm["ptx"]


if __name__ == "__main__":
    launches, capability = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps([compiled(launch, capability) for launch in launches]))
