"""A decode step of every family with a GPU's kernels reads nothing back from the device, so that it can be captured.

It is computed on meta tensors, which have no numbers: code that needs one on the host gets an error, and so does code
that makes a tensor whose shape follows from numbers on the device. Kernels are recorded and not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve_llm.engine.model.build import ModelBuilder, WeightSlice, is_float32
from serve_llm.engine.model.decoder import Decoder, build_decoder
from serve_llm.engine.model.inputs import KVGroupInputs, StepInputs
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import LayerSpec, MLASpec, ModelSpec
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.kernels import registry
from serve_llm.kernels.attention import Lengths
from support.tiny import FAMILIES, HYBRIDS, WITH_EXPERTS, config_of
from support.triton import NO_TRITON, record

META = torch.device("meta")
ROWS, BLOCKS, BLOCK_SIZE = 5, 9, 8


class OnTheDevice(TorchDispatchMode):
    """Fails if an operator gets a tensor on the host: everything from the host must have been copied before the
    step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)}
        assert devices <= {"meta"}, f"{func} with tensors on {devices}"
        return found


def decoder_of(spec: ModelSpec, batch_invariant: bool = False, device: torch.device = META) -> Decoder:
    kernels = registry.with_triton(batch_invariant)
    assert isinstance(kernels, registry.Kernels), kernels

    def parameter(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        sizes = list(shape)
        if part is not None:
            sizes[part.dimension] = len(part.range)
        return torch.zeros(sizes, dtype=dtype or (torch.float32 if is_float32(name) else torch.bfloat16), device=device)

    shard = build_shard(spec, ParallelLayout(), 0)
    builder = ModelBuilder(
        parameter, kernels, shard, ProcessGroups(), fp8=spec.fp8, dtype=torch.bfloat16, device=device
    )
    return build_decoder(spec, builder, device)


def whole_numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=META)


def step(spec: ModelSpec) -> StepInputs:
    group = KVGroupInputs(whole_numbers(ROWS), whole_numbers(ROWS, 4, dtype=torch.int32))
    return StepInputs(
        ids=whole_numbers(ROWS),
        positions=whole_numbers(ROWS),
        query_starts=list(range(ROWS + 1)),
        context_lens=[4 * BLOCK_SIZE] * ROWS,
        groups=(group,) * len(spec.kv_groups),
        lengths=Lengths(whole_numbers(ROWS + 1, dtype=torch.int32), whole_numbers(ROWS, dtype=torch.int32)),
    )


def cache_of(layer: LayerSpec) -> Tensor:
    mixer = layer.attention
    parts = 1 if isinstance(mixer, MLASpec) else 2
    return torch.empty(
        (BLOCKS, parts, mixer.num_kv_heads, BLOCK_SIZE, mixer.cached_head_dim), dtype=torch.bfloat16, device=META
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in HYBRIDS])
def test_a_decode_step_reads_nothing_back(family: str, batch_invariant: bool) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    spec, _ = read_model(config_of(family))
    decoder = decoder_of(spec, batch_invariant)
    assert decoder.capturable
    made: list[Tensor] = []

    def compute() -> None:
        with torch.inference_mode(), OnTheDevice():
            hidden = decoder.forward(step(spec), [cache_of(layer) for layer in spec.layers])
            made.append(decoder.logits(hidden))

    launches = {launch.kernel.name for launch in record(compute)}
    assert (made[0].shape[0], made[0].device) == (ROWS, META)
    assert "_multiply_experts" in launches if family in WITH_EXPERTS else "_multiply_experts" not in launches


@pytest.mark.parametrize("family", HYBRIDS)
def test_steps_with_states_are_not_captured(family: str) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    assert not decoder_of(read_model(config_of(family))[0]).capturable


def test_what_would_be_noticed() -> None:
    x = torch.empty(3, device=META)
    with torch.inference_mode(), OnTheDevice():
        assert (x + 1.0).shape == (3,)
        with pytest.raises(RuntimeError):
            x.tolist()
        with pytest.raises(NotImplementedError):
            x[x > 0]
        with pytest.raises(AssertionError, match="cpu"):
            x + torch.tensor([1.0, 2.0, 3.0]).to(META)


@pytest.mark.parametrize("family", [family for family in WITH_EXPERTS if family not in HYBRIDS])
def test_experts_in_8_bits_are_captured(family: str) -> None:
    """One launch multiplies all experts. They are packed by value, so this decoder has real numbers."""
    pytest.importorskip("triton", reason=NO_TRITON)
    assert decoder_of(read_model(config_of(family))[0].with_fp8(), device=torch.device("cpu")).capturable
