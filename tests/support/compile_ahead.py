"""Compiles kernels ahead for a GPU that need not be there, and prints one JSON line about what happened.

A test starts this as a process of its own, where kernels are not interpreted."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from serve_llm.kernels.triton.activation import ACTIVATIONS, _gated_kernel
from serve_llm.kernels.triton.compile_ahead import compile_ahead
from serve_llm.kernels.triton.norm import _layer_norm, _rms_norm, layer_norm, rms_norm
from support.triton_kernels import multiply

loaded_on: list[str] = []  # thread by thread


def load_binary(name: str, *_: object) -> tuple[int, int, int, int, int]:
    """Module, function, registers, spilled bytes, most threads."""
    if name == "_gated_kernel":
        raise RuntimeError("out of memory")
    loaded_on.append(threading.current_thread().name)
    return 1, 1, 32, 0, 1024


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 1 << 17})
    driver.set_active(  # it can launch nothing
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
            launcher_cls=lambda source, metadata: "launcher",
            utils=utils,
        )
    )
    torch.cuda.set_device = lambda device: None
    x, weight, wide = torch.ones(3, 64), torch.ones(64), torch.ones(3, 512)
    run = triton.JITFunction.run
    torch.use_deterministic_algorithms(True)  # what torch does not fill holds NaN
    with torch.inference_mode(), compile_ahead(torch.device("cuda"), 2):
        results = [rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), layer_norm(x, weight, weight, 1e-6)]
        rms_norm(wide, wide[0], 1e-6)
        multiply(x, x)
        ACTIVATIONS["silu_and_mul"](x)
    loaded = len(loaded_on)
    error = ""
    try:
        multiply(x, x)
    except Exception as raised:
        error = str(raised)
    kernels = [list(function.device_caches[0][0].values()) for function in (_rms_norm, _layer_norm)]
    found = {
        "compiled": [[type(kernel).__name__ for kernel in each] for each in kernels],
        "launchers": [kernel.run for each in kernels for kernel in each],
        "loaded_by_main": loaded_on.count(threading.main_thread().name),
        "loaded": loaded,
        "is_forgotten": not _gated_kernel.device_caches[0][0],
        "are_zeros": all(bool((result == 0).all()) for result in results),
        "is_restored": triton.JITFunction.run is run,
        "error": error,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
