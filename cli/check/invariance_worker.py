"""Try each shape of linear layer of a model, as `kernels.invariance` does when the server starts, but with more rows.

Runs as a separate process (`invariance.check_invariance`), with the checkpoint's directory in argv; writes an
`InvarianceReport` as JSON. Weights are random: only the shape and the dtype decide which code runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from serve_llm.cli.check.invariance import InvarianceReport
from serve_llm.cli.plan.weights import LinearShape, linear_shapes
from serve_llm.common.hub import read_config
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.headers import find_checkpoint_dtype
from serve_llm.kernels import invariance, registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.invariance import LayerKind, PaddedLinear
from serve_llm.kernels.linear import Linear

CPU = torch.device("cpu")
MAX_MULTIPLICATIONS = 3 * 10**10  # in one call; limits the number of rows
RANDOM_ROWS = 512  # per weight, then they repeat: generating random numbers takes longer than multiplying them


def try_layers(directory: str) -> InvarianceReport:
    raw = read_config(directory)
    spec, _ = read_model(raw)
    dtype = torch.float32 if find_checkpoint_dtype(raw, Path(directory))[0] == "float32" else torch.bfloat16
    shapes = linear_shapes(spec, Shard(ParallelLayout(), 0, range(len(spec.layers))))
    slow: list[str] = []
    differing: list[str] = []
    count = 0
    for shape in sorted(shapes):
        for in_8_bits in (False, True) if shape.in_layers else (False,):
            rows_dtype = torch.float32 if shape.float32 else dtype
            layer = _make_layer(shape, rows_dtype, in_8_bits)
            kind = LayerKind("int8" if in_8_bits else "rows", shape.outputs, shape.inputs, rows_dtype)
            batch_size = min(
                max(MAX_MULTIPLICATIONS // (shape.outputs * shape.inputs), invariance.MIN_ROWS), invariance.MAX_ROWS
            )
            name = f"{shape.outputs} x {shape.inputs} in {'int8' if in_8_bits else str(rows_dtype)[6:]}"
            if isinstance(layer, PaddedLinear):
                slow.append(f"{name} ({layer.rows} rows at a time)")
            if sizes := invariance.differing_sizes(layer, kind, batch_size):
                differing.append(f"{name} ({sizes[0]} rows against {batch_size})")
            count += 1
    return InvarianceReport(num_shapes=count, variant=library.find_variant() or "torch", slow=slow, differing=differing)


def _make_layer(shape: LinearShape, dtype: torch.dtype, in_8_bits: bool) -> Linear:
    kernels = registry.choose(CPU, dtype, ())
    weight = torch.randn((min(shape.outputs, RANDOM_ROWS), shape.inputs)).to(dtype)
    weight = weight.repeat(-(-shape.outputs // RANDOM_ROWS), 1)[: shape.outputs]
    if in_8_bits:
        return kernels.pack_int8(*kernels.quantise_int8(weight), None)
    return kernels.pack(weight, None)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.stdout.write(msgspec.json.encode(try_layers(sys.argv[1])).decode() + "\n")
