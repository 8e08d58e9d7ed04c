"""fp8 weights as checkpoints store them, multiplied by inputs that are rounded to 8 bits: whether results are right,
the time of a layer compared with unpacking its weight, and the shape of Llama 8B in blocks of 128 x 128."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from floors import LLAMA_8B_BLOCKS
from torch import Tensor

from parts import common
from parts.attention import difference
from parts.kernels import Found, Numbers, tell
from parts.speed import measure_shape
from serve_llm.kernels import linear_fp8, linear_fp8_blocks, registry
from serve_llm.kernels.bench_gpu import Call, Case, graph_us
from serve_llm.kernels.linear_fp8_stored import pack_stored_fp8
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.registry import Kernels, PackGrouped

BF16 = torch.bfloat16
BLOCK = linear_fp8_blocks.BLOCK
FORMS = ("row", "row, static inputs", "128 x 128 block", "128 inputs")
SHAPES = {"up": (28672, 4096), "down": (4096, 14336)}  # of Llama 8B: most of a step's bytes


def make_weight(form: str, outputs: int, inputs: int, random: Numbers) -> GroupQuantWeight:
    codes, scale = linear_fp8.quantise_rows(random(outputs, inputs), inputs)
    codes = codes.view(torch.uint8)
    if form.startswith("row"):
        input_scale = torch.tensor(0.02, device=random.device) if "static" in form else None
        return GroupQuantWeight(codes, 8, scale, inputs, is_float8=True, rounds_inputs=True, input_scale=input_scale)
    scales = 0.01 * (1 + random(outputs, -(-inputs // BLOCK), dtype=torch.float32).abs())
    if form == "128 x 128 block":
        scales = scales[::BLOCK].repeat_interleave(BLOCK, 0)[:outputs]
    return GroupQuantWeight(codes, 8, scales, BLOCK, is_float8=True, rounds_inputs=True)


def round_inputs(weight: GroupQuantWeight, x: Tensor) -> Tensor:
    """Return the inputs as they are after rounding, in float32."""
    inputs = x.shape[1]
    if weight.scales.shape[1] == 1:
        numbers, scales = linear_fp8.quantise_rows(x, inputs, weight.input_scale)
        return numbers.float() * scales
    numbers, scales = linear_fp8_blocks.quantise_blocks(x, -(-inputs // BLOCK) * BLOCK)
    return (numbers.float() * scales.repeat_interleave(BLOCK, 1))[: len(x), :inputs]


def products(pack: PackGrouped, form: str, random: Numbers, shapes: tuple[tuple[int, int], ...]) -> Found:
    for outputs, inputs in shapes:
        weight = make_weight(form, outputs, inputs, random)
        exact = weight.dequantise()
        for bias in (None, random(outputs)):
            layer = pack(weight, bias, BF16)
            for rows in (1, 2, 17, 64, 300):
                x = random(rows, inputs)
                wanted = round_inputs(weight, x) @ exact.t() + (0 if bias is None else bias.float())
                yield f"a scale per {form}, over the rounded inputs", difference(layer(x), wanted), 2e-2


def is_supported(form: str, device: torch.device) -> bool:
    if form.startswith("row"):
        return linear_fp8.is_supported(device)
    return linear_fp8_blocks.is_supported(device, form == "128 x 128 block")


def time_layers(here: common.Place, kernels: Kernels, form: str, random: Numbers) -> None:
    """Report how long a layer takes for few and many rows, with each kind of product."""
    assert kernels.pack_stored_fp8 is not None
    kinds = {"inputs rounded": kernels.pack_stored_fp8, "weight unpacked": kernels.pack_grouped}
    for name, (outputs, inputs) in SHAPES.items() if not here.rehearse else [("up", (96, 128))]:
        for (kind, pack), rows in product(kinds.items(), (1, 16, 64, here.sized(8192, 65))):

            def make(pack: PackGrouped = pack, rows: int = rows, shape: tuple[int, int] = (outputs, inputs)) -> Call:
                return partial(pack(make_weight(form, *shape, random), None, BF16), random(rows, shape[1]))

            case = Case(name, make, outputs * inputs)
            took = common.seconds(make()) * 1e6 if here.rehearse else graph_us(case)
            here.report.measured(f"{name}, a scale per {form}, {rows} rows: {kind}", took, "µs")


@torch.inference_mode()
def main() -> None:
    here = common.place("stored_fp8")
    device = torch.device(here.device)
    random = Numbers(device)
    kernels = replace(registry.PORTABLE, pack_stored_fp8=pack_stored_fp8)
    if not here.rehearse:
        found = registry.with_triton(batch_invariant=False)
        assert isinstance(found, Kernels), found
        kernels = found
    assert kernels.pack_stored_fp8 is not None
    shapes = ((130, 300),) if here.rehearse else ((130, 300), (2112, 7168), (6144, 4096), (4096, 14336))
    for form in FORMS:
        if is_supported(form, device):
            tell(here, products(kernels.pack_stored_fp8, form, random, shapes), f"a scale per {form}")
        else:
            here.report.not_run(f"a scale per {form}", f"torch {torch.__version__} has no such product here")
    measure_shape(here, "8B in fp8 blocks", LLAMA_8B_BLOCKS)
    for form in ("row", "128 x 128 block"):
        if is_supported(form, device):
            time_layers(here, kernels, form, random)


if __name__ == "__main__":
    main()
