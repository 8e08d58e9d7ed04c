"""Embedding and LM head of quantised checkpoints, and the memory that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_llm.common.options.sources import make_options
from serve_llm.engine.model.build import ModelBuilder, WeightSlice
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.vocabulary import VocabularyTables
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.kernels.cpu import library
from serve_llm.kernels.held_tensors import find_tensors
from serve_llm.kernels.quantise_int8 import quantise_int8
from serve_llm.kernels.registry import PORTABLE, choose
from support import published
from support.resolved import resolve_all

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
W8A16 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": []}
W8A16 |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}}
W8A16["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "symmetric": True}
GGUF = {"quant_method": "gguf", "architecture": "llama", "tensors": {"token_embd.weight": "Q8_0"}}
KERNELS = [PORTABLE, *([choose(torch.device("cpu"), torch.bfloat16, {16})] if library.find() else [])]
IDS = torch.tensor([5, 0, 30])


def resolve(config: dict[str, Any], **options: object) -> ModelSpec:
    """Return the spec as a CPU serves it."""
    chosen = make_options("model", **{"device": "cpu", "kv_cache_memory": "1MiB", "load_format": "dummy", **options})
    _, spec, _ = resolve_all(chosen, "/nowhere", published.LLAMA_1B | config)
    assert isinstance(spec, ModelSpec)
    return spec


@pytest.mark.parametrize(
    ("config", "options", "head", "embedding"),
    [
        ({}, {}, False, False),
        ({}, {"quantization": "int8"}, True, True),
        ({}, {"quantization": "fp8"}, True, True),
        ({}, {"quantization": "int8", "dtype": "float32"}, True, False),
        ({"quantization_config": AWQ}, {}, True, True),
        ({"quantization_config": AWQ}, {"dtype": "float32"}, False, False),
        ({"quantization_config": AWQ, "tie_word_embeddings": False}, {}, True, False),
        ({"quantization_config": GGUF}, {}, False, False),
    ],
)
def test_what_is_quantised_while_loading(
    config: dict[str, Any], options: dict[str, object], head: bool, embedding: bool
) -> None:
    spec = resolve(config, **options)
    assert (spec.int8_lm_head, spec.int8_embedding) == (head, embedding)


def test_4_bit_layers_have_a_4_bit_head() -> None:
    form = GroupQuantForm(4, 64, has_zeros=True)
    tied = resolve({}, quantization="int4")
    assert tied.head_form == tied.embedding_form == form and not tied.int8_lm_head
    apart = resolve({"tie_word_embeddings": False}, quantization="int4")
    assert (apart.head_form, apart.embedding_form) == (form, None)
    exact = resolve({}, quantization="int4", dtype="float32")
    assert exact.head_form is None and exact.int8_lm_head and not exact.int8_embedding


def test_what_a_checkpoint_stores_packed() -> None:
    spec = resolve({"quantization_config": GGUF})
    assert spec.embedding_form == spec.head_form == GroupQuantForm(8, 32, has_zeros=False)
    assert spec.grouped is not None and not spec.grouped.layer_forms
    apart = {"tie_word_embeddings": False}
    for stored in (W8A16, {"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}):
        spec = resolve({"quantization_config": stored, **apart})
        assert spec.head_form == GroupQuantForm(8, None, has_zeros=False) and spec.embedding_form is None
        assert not spec.int8_lm_head
    assert resolve({"quantization_config": W8A16 | {"ignore": ["lm_head"]}, **apart}).head_form is None


def test_gpus_hold_them_in_the_models_dtype() -> None:
    spec, _ = read_model(published.LLAMA_1B | {"quantization_config": GGUF})
    chosen = make_options("model", device="cpu", kv_cache_memory="1MiB", load_format="dummy")
    config, _, _ = resolve_all(chosen, "/nowhere", published.LLAMA_1B)
    assert not isinstance(config, ModelSpec)
    served = apply_engine_config(spec, replace(config, device="cuda"))
    assert served.embedding_form is None and served.head_form is None and not served.int8_lm_head


@pytest.mark.parametrize("kernels", KERNELS)
def test_tied_int8_tables_have_one_copy(kernels: Any) -> None:
    spec, _ = read_model(published.LLAMA_1B | {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 1})
    spec = replace(spec, int8_lm_head=True, int8_embedding=True)
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    reads = []

    def load(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        reads.append(name)
        return weight

    shard = build_shard(spec, ParallelLayout(), 0)
    builder = ModelBuilder(load, kernels, shard, ProcessGroups(), dtype=torch.bfloat16)
    tables = VocabularyTables(spec, builder)
    look_up = tables.load_embedding(has_head=True)
    head = tables.load_head()
    assert reads == ["embedding.weight"]
    numbers, scales = quantise_int8(weight)
    assert torch.equal(look_up(IDS), (numbers * scales).bfloat16()[IDS])
    assert torch.allclose(
        head(torch.eye(64).bfloat16()).float().T, numbers * scales, rtol=0.02, atol=0.02 * float(scales.max())
    )
    if kernels is not PORTABLE:
        held = {tensor.data_ptr(): tensor.nbytes for tensor in find_tensors((look_up, head))}
        assert sum(held.values()) < 2 * weight.numel()
