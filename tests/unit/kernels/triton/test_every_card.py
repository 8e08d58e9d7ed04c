"""Every kernel of the product compiles for every kind of card, with the sizes of published models. Resources and tensor
cores are tested with each kernel."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import cache_fp8
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.sampling import LogitAdjustments
from support.delta_rule import make_layer
from support.grouped import make_weight
from support.triton import NO_TRITON, SHARED_BYTES, Launch, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels import triton as package
from serve_llm.kernels.triton.activation import ACTIVATIONS
from serve_llm.kernels.triton.attention import paged_attention
from serve_llm.kernels.triton.delta_rule import gated_delta_rule
from serve_llm.kernels.triton.fp8 import quantise_blocks, quantise_rows
from serve_llm.kernels.triton.linear import pack
from serve_llm.kernels.triton.linear_grouped import pack_grouped
from serve_llm.kernels.triton.lora import TritonLoRASlots
from serve_llm.kernels.triton.moe import pack_experts
from serve_llm.kernels.triton.norm import layer_norm, rms_norm
from serve_llm.kernels.triton.rope import rope_and_cache, rope_and_latent
from serve_llm.kernels.triton.sampling import adjust, apply_masks, log_softmax_gather, sample

FLOAT8_CAPABILITY = 89  # the first with float8_e4m3fn in the compiler


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return empty(*shape, dtype=dtype)


def launch_rows() -> None:
    rms_norm(empty(3, 4096), empty(4096), 1e-6)
    layer_norm(empty(3, 4096), empty(4096), empty(4096), 1e-6)
    for activation in ACTIVATIONS.values():
        activation(empty(3, 2 * 14336))
    rope_and_cache(empty(3, 48 * 128), 32, None, None, empty(10, 2, 8, 16, 128), integers(3))
    rope_and_latent(empty(3, 128, 64), empty(3, 576), empty(512), 1e-6, None, empty(10, 1, 1, 16, 576), integers(3))


def launch_float8() -> None:
    quantise_rows(empty(3, 4096), 4096)
    quantise_rows(empty(3, 4096), 4096, empty(dtype=torch.float32))
    quantise_blocks(empty(3, 4096), 4096)
    cache = empty(10, 2, 8, 16, 128, dtype=cache_fp8.DTYPE)
    rope_and_cache(empty(3, 48 * 128), 32, None, None, cache, integers(3))
    latent = empty(10, 1, 1, 16, 576, dtype=cache_fp8.DTYPE)
    rope_and_latent(empty(3, 128, 64), empty(3, 576), empty(512), 1e-6, None, latent, integers(3))


def launch_attention() -> None:
    on_device = Lengths(integers(3, dtype=torch.int32), integers(2, dtype=torch.int32))
    cache, table = empty(100, 2, 8, 16, 128), integers(2, 512, dtype=torch.int32)
    paged_attention(empty(66, 32, 128), cache, table, [0, 1, 66], [8192] * 2, scale=0.1, on_device=on_device)


def launch_delta_rule() -> None:
    layer = make_layer((16, 2, 128, 128), torch.bfloat16)
    _, channels = layer.conv.shape
    cache = torch.zeros(2, 3 * channels + layer.heads * layer.key_dim * layer.row)
    qkv, gates = torch.zeros(8, channels, dtype=torch.bfloat16), torch.zeros(8, 2 * layer.heads, dtype=torch.bfloat16)
    gated_delta_rule(qkv, gates, layer, cache, [0, 1], [0, 7, 8], [7, 30])


def launch_products() -> None:
    pack(empty(4096, 4096))(empty(7, 4096))
    grouped = pack_grouped(make_weight("int4 zeros", 256, 1024, 128), None, torch.bfloat16)
    for rows in (1, 3, 4096):
        grouped(empty(rows, 1024))


def launch_adapters() -> None:
    adapters = TritonLoRASlots(1, 16, 4096, (4096, 1024), torch.bfloat16, torch.device("meta"))
    adapters.add(empty(64, 5120), empty(64, 4096), integers(64))


def launch_experts() -> None:
    def halve(rows: Tensor) -> Tensor:
        return rows[:, :256].contiguous()

    plain = pack(empty(512, 256)), pack(empty(256, 256))
    pack_experts([plain] * 4, halve, range(4))(empty(3, 256), empty(3, 2), torch.zeros_like(integers(3, 2)))
    up, down = make_weight("mxfp4", 512, 256, 32), make_weight("mxfp4", 256, 256, 32)
    packed = pack_grouped(up, None, torch.bfloat16), pack_grouped(down, None, torch.bfloat16)
    x, chosen = torch.zeros((3, 256), dtype=torch.bfloat16), torch.zeros((3, 2), dtype=torch.int64)
    pack_experts([packed] * 4, halve, range(4))(x, torch.zeros(3, 2), chosen)


def launch_sampling() -> None:
    logits = empty(256, 151936)
    sample(logits, empty(256, 5, dtype=torch.float64))
    log_softmax_gather(logits, integers(256), 20)
    adjust(logits.float(), LogitAdjustments(integers(9, 4, dtype=torch.int32), integers(9, 6, dtype=torch.int32)))
    apply_masks(logits.float(), integers(16), integers(16, 4748, dtype=torch.int32))


BASE = (
    launch_rows,
    launch_attention,
    launch_delta_rule,
    launch_products,
    launch_adapters,
    launch_experts,
    launch_sampling,
)


def list_kernels() -> set[str]:
    """Return the names of all kernels that the package launches, `name[grid](...)`."""
    found = set()
    for path in Path(package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                if isinstance(called, ast.Name):
                    found.add(called.id)
    return found


def record_all(calls: Iterable[Callable[[], None]]) -> list[Launch]:
    return [launch for call in calls for launch in record(call)]


def test_no_kernel_is_left_out() -> None:
    names = list_kernels()
    assert {launch.kernel.name for launch in record_all([*BASE, launch_float8])} == names and len(names) > 25


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_every_kernel_is_compiled(capability: int) -> None:
    """`compile_for` raises the compiler's errors."""
    calls = [*BASE, launch_float8] if capability >= FLOAT8_CAPABILITY else BASE
    for kernel in compile_for(record_all(calls), capability):
        assert kernel.registers > 0 and kernel.shared_bytes <= SHARED_BYTES, kernel


@pytest.mark.slow
def test_rows_states_and_adapters_are_compiled_for_ampere() -> None:
    """Other kernels are compiled for sm_80 by their own tests, or take minutes."""
    for kernel in compile_for(record_all([launch_rows, launch_delta_rule, launch_adapters]), 80):
        assert kernel.stack_bytes <= 16, kernel
