"""What each rank of a grid requests from the loader: everything once, and no rank much more than its share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from serve_llm.engine.model.build import ModelBuilder, WeightSlice
from serve_llm.engine.model.decoder import build_decoder
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.quantization_spec import Int8Spec
from serve_llm.engine.model.shard import build_shard, describe_split, split_model_layers
from serve_llm.engine.model.spec import (
    AttentionSpec,
    LayerSpec,
    LearnedPositions,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RouterSpec,
)
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.kernels.registry import PORTABLE
from support.config import CONFIG
from support.ranks import Ranks

RMS = NormSpec("rms", 1e-6)


def model(heads: int, kv_heads: int, head_dim: int, width: int, ffn: int, vocab: int, layers: int) -> ModelSpec:
    mixer = AttentionSpec(heads, kv_heads, head_dim, 1.0, qkv_bias=True, output_bias=True)
    layer = LayerSpec(mixer, MLPSpec(ffn, "silu", gated=True, bias=True), RMS)
    return ModelSpec("X", vocab, width, 4096, (layer,) * layers, RMS, tie_word_embeddings=False)


MODELS = {
    "qwen2.5-7b": model(28, 4, 128, 3584, 18944, 152064, 28),
    "qwen2.5-0.5b": model(14, 2, 64, 896, 4864, 151936, 24),
    "llama-70b": model(64, 8, 128, 8192, 28672, 128256, 80),
    "llama-13b": model(40, 40, 128, 5120, 13824, 32000, 40),
    "smollm2": model(9, 3, 64, 576, 1536, 49152, 30),
    "awkward": model(6, 3, 14, 60, 97, 331, 3),
}


def asked(
    spec: ModelSpec, grid: ParallelLayout, **how: object
) -> list[dict[str, tuple[tuple[int, ...], WeightSlice | None]]]:
    """Return each rank's requests to the loader: name -> shape of the whole tensor, and the part."""
    found = []
    ranks = Ranks(spec, grid, **how)
    for shard, neighbours in zip(ranks.shards, ranks.neighbours, strict=True):
        calls: dict[str, tuple[tuple[int, ...], WeightSlice | None]] = {}

        def load(name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype=None, calls=calls) -> Tensor:
            assert name not in calls, f"{name} is read twice"
            calls[name] = shape, part
            return torch.empty(size(shape, part), device="meta")

        build_decoder(spec, ModelBuilder(load, PORTABLE, shard, neighbours), torch.device("cpu"))
        found.append(calls)
    return found


def size(shape: tuple[int, ...], part: WeightSlice | None) -> list[int]:
    return [len(part.range) if part and part.dimension == number else whole for number, whole in enumerate(shape)]


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_no_rank_has_much_more_than_its_part(name: str, tensor: int) -> None:
    spec = replace(MODELS[name], layers=MODELS[name].layers[:2])
    mixer = spec.layers[0].attention
    whole = Counter[str]()
    for parameter, (shape, _) in asked(spec, ParallelLayout())[0].items():
        whole[parameter] = prod(shape)
    head = (
        2 * mixer.head_dim * (spec.hidden_size + 1)
    )  # values in q and output for a query head, in k and v for a KV head
    for calls in asked(spec, ParallelLayout(tensor)):
        own = {parameter: prod(size(shape, part)) for parameter, (shape, part) in calls.items()}
        assert own.keys() == whole.keys()

        def excess(*names: str, own=own) -> float:
            return sum(own[each] - whole[each] / tensor for each in names if "norm" not in each)

        for layer in range(2):
            in_layer = [each for each in whole if each.startswith(f"layers.{layer}.attention.")]
            assert excess(*in_layer) <= 2 * head + spec.hidden_size  # one query head and one KV head
            in_layer = [each for each in whole if each.startswith(f"layers.{layer}.ffn.")]
            assert excess(*in_layer) <= 16 * (3 * spec.hidden_size + 2) + spec.hidden_size
        assert excess("embedding.weight") <= 16 * spec.hidden_size
        assert excess("head.weight") <= 16 * spec.hidden_size


@pytest.mark.parametrize(
    "grid",
    [
        ParallelLayout(2),
        ParallelLayout(3),
        ParallelLayout(7),
        ParallelLayout(12),
        ParallelLayout(2, 2),
        ParallelLayout(1, 3),
        ParallelLayout(5, 3),
    ],
)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_all_parts_together_are_the_model(name: str, split: bool, grid: ParallelLayout) -> None:
    spec = replace(
        MODELS[name], layers=MODELS[name].layers[:3], learned_positions=LearnedPositions(7), embedding_size=24
    )
    weights = tuple(1.0 + place % 3 for place in range(grid.tp_size)) if split else None
    calls = asked(spec, grid, split=weights)
    for parameter, (shape, _) in asked(spec, ParallelLayout())[0].items():
        holders = [found[parameter] for found in calls if parameter in found]
        assert len(holders) == grid.tp_size, f"{parameter} belongs to one stage"
        assert {whole for whole, _ in holders} == {shape}
        parts = [part for _, part in holders if part is not None]
        if not parts:
            continue  # whole on every rank
        held = [index for part in parts for index in part.range]
        once = not parameter.endswith(("attention.k.weight", "attention.k.bias", "attention.v.weight", "v.bias"))
        if "project" in parameter:
            assert held == [*range(shape[0])] * grid.tp_size
        elif once:
            assert held == [*range(shape[parts[0].dimension])]
        else:  # each rank with one of a KV head's query heads holds the KV head
            assert set(held) == {*range(shape[0])}


def test_a_tied_embedding_is_read_again_by_the_last_stage() -> None:
    spec = replace(MODELS["awkward"], tie_word_embeddings=True)
    names = [set(found) for found in asked(spec, ParallelLayout(2, 2))]
    assert all("embedding.weight" in found and "head.weight" not in found for found in names)
    assert ["final_norm.weight" in found for found in names] == [False, False, True, True]
    assert "embedding.weight" not in asked(spec, ParallelLayout(1, 3))[1]


def test_whole_experts_are_each_on_one_rank() -> None:
    plain = MODELS["awkward"].layers[0]
    layer = replace(
        plain, ffn=MoESpec(RouterSpec(7, 2), MLPSpec(50, "silu", gated=True), shared_expert=MLPSpec(50, "relu"))
    )
    spec = replace(MODELS["awkward"], layers=(layer,) * 2).with_expert_parallel()
    for rank, found in enumerate(asked(spec, ParallelLayout(3, 2))):
        of_experts = [name for name in found if ".experts." in name]
        assert {int(name.split(".")[4]) for name in of_experts} == set((range(3), range(3, 5), range(5, 7))[rank % 3])
        assert all(size(*found[name]) == [*found[name][0]] for name in of_experts)  # as a whole
    names = [f"layers.1.ffn.experts.{number}.up.weight" for number in range(7)]
    assert sum(shard.holds(name, spec) for shard in Ranks(spec, ParallelLayout(3, 2)).shards for name in names) == 7
    config = replace(CONFIG, tensor_parallel_size=3, enable_expert_parallel=True)
    assert describe_split(spec, config)[0].endswith("experts (of 7) 3+2+2, vocabulary rows 111+110+110")
    for engine in range(2):
        one_of_two = replace(config, data_parallel_size=2, data_parallel_rank=engine)
        assert describe_split(spec, one_of_two)[1] == "Expert parallel, 2 engines: experts (of 7) 2+1+1+1+1+1"


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8, 16, 33])
@pytest.mark.parametrize("interleaved_key_heads", [False, True])
def test_ranks_have_the_key_heads_that_their_heads_use(interleaved_key_heads: bool, tensor: int) -> None:
    mixer = GatedDeltaNetSpec(32, 16, 128, 128, 4, 1e-6, interleaved_key_heads=interleaved_key_heads)
    assert [mixer.find_key_head(head) for head in (0, 1, 16, 31)] == (
        [0, 1, 0, 15] if interleaved_key_heads else [0, 0, 8, 15]
    )
    base = model(32, 2, 64, 64, 64, 64, 1)
    spec = replace(base, layers=(replace(base.layers[0], attention=mixer),))
    shares = [build_shard(spec, ParallelLayout(tensor), rank).attention(mixer) for rank in range(tensor)]
    assert [head for share in shares for head in share.heads] == list(range(32))
    for share in shares:
        used = {mixer.find_key_head(head) for head in share.heads}
        assert used <= set(share.kv_heads) and (tensor != 4 or len(used) == len(share.kv_heads))


def test_layers_as_chosen_and_by_cost() -> None:
    spec = MODELS["qwen2.5-0.5b"]
    chosen = [build_shard(spec, ParallelLayout(1, 3), rank, layers=(9, 8, 7)).layers for rank in range(3)]
    assert chosen == [range(9), range(9, 17), range(17, 24)]
    by_cost = [build_shard(spec, ParallelLayout(1, 2), rank).layers for rank in range(2)]
    assert len(by_cost[0]) > len(by_cost[1]) > 0  # the head costs as much as several layers


def test_a_head_in_16_bits_weighs_twice_as_much_beside_layers_in_int8() -> None:
    spec = MODELS["qwen2.5-0.5b"]
    assert [len(layers) for layers in split_model_layers(spec, ParallelLayout(1, 2))] == [17, 7]
    stored = replace(spec, int8=Int8Spec(in_checkpoint=True))
    assert [len(layers) for layers in split_model_layers(stored, ParallelLayout(1, 2))] == [21, 3]
    assert [len(layers) for layers in split_model_layers(spec.with_int8(), ParallelLayout(1, 2))] == [17, 7]


def test_the_log_says_who_gets_how_much() -> None:
    spec = MODELS["qwen2.5-7b"]
    assert describe_split(spec, CONFIG) == []
    grid = replace(CONFIG, tensor_parallel_size=3, pipeline_parallel_size=2, pipeline_parallel_layers=(15, 13))
    assert describe_split(spec, grid) == [
        "Tensor parallel, 3 ranks: query heads 10+9+9, KV heads (of 4) 2+2+2, feed-forward columns 6320+6320+6304, "
        "vocabulary rows 50688+50688+50688",
        "Pipeline parallel, 2 stages: layers 15+13",
    ]
