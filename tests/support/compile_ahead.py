"""Compiles kernels in advance for a GPU that need not be present, and prints one JSON line about the outcome.

A test starts this as a separate process, in which kernels are not interpreted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from serve_llm.kernels.triton.compile_ahead import compile_ahead
from serve_llm.kernels.triton.norm import _layer_norm, _rms_norm, layer_norm, rms_norm
from support.triton_kernels import _multiply, multiply


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(  # it can launch nothing
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    x, weight, wide = torch.ones(3, 64), torch.ones(64), torch.ones(3, 512)
    run = triton.JITFunction.run
    torch.use_deterministic_algorithms(True)  # uninitialised tensors hold NaN
    with torch.inference_mode(), compile_ahead(2):
        results = [rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), layer_norm(x, weight, weight, 1e-6)]
        rms_norm(wide, wide[0], 1e-6)
        multiply(x, x)
    is_forgotten = not _multiply.device_caches[0][0]
    error = ""
    try:
        multiply(x, x)
    except Exception as raised:
        error = str(raised)
    found = {
        "compiled": [
            [type(kernel).__name__ for kernel in function.device_caches[0][0].values()]
            for function in (_rms_norm, _layer_norm)
        ],
        "is_forgotten": is_forgotten,
        "are_zeros": all(bool((result == 0).all()) for result in results),
        "is_restored": triton.JITFunction.run is run,
        "error": error,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
