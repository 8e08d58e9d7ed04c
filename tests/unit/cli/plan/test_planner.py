"""Which models fit where, and what is suggested, for well-known shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_llm.cli.plan.command import read_command_line
from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import MemoryPlan, build_plan, make_plan
from serve_llm.cli.plan.remedies import describe_shortage, find_remedies
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.sources import make_options
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker import kv_cache
from support import published

GIB = 2**30


def plan(raw: dict[str, object], machines: dict[str, object], **options: object) -> MemoryPlan:
    return make_plan(make_options("model", **options), HardwareOptions(**machines), raw)


@pytest.mark.parametrize(
    ("raw", "machines", "options", "sizes", "reason"),
    [
        (published.LLAMA_8B, {"gpu": "h200"}, {}, (1, 1), "it fits one GPU"),
        (published.LLAMA_70B, {"gpu": "h100"}, {}, (4, 1), "within a node"),
        (published.LLAMA_70B, {"gpu": "h100"}, {"max_model_len": "8k"}, (2, 1), "within a node"),
        (published.LLAMA_70B, {"gpu": "h200"}, {"max_model_len": "32k"}, (2, 1), "within a node"),
        (published.LLAMA_70B, {"memory": 16 * GIB, "nodes": 2}, {"max_model_len": "8k"}, (8, 2), "over nodes"),
        (published.LLAMA_405B, {"gpu": "h100", "nodes": 2}, {}, (8, 2), "pipeline parallel over nodes"),
        (published.LLAMA_405B, {"gpu": "h100", "nodes": 4}, {}, (8, 2), "pipeline parallel over nodes"),
        (published.LLAMA_8B, {"gpu": "l4"}, {}, (1, 2), "no NVLink"),
        (published.LLAMA_70B, {"gpu": "l40s"}, {"max_model_len": "8k"}, (1, 4), "no NVLink"),
        (published.LLAMA_70B, {"gpu": "h100", "nvlink": False}, {}, (1, 3), "no NVLink"),
        (published.QWEN2_7B, {"gpu": "h100"}, {}, (1, 1), "it fits one GPU"),
        (published.QWEN2_7B, {"memory": 5 * GIB}, {"max_num_batched_tokens": 2048}, (7, 1), "within a node"),
        (published.GPT2_XL, {"memory": 6 * GIB, "gpus_per_node": 4}, {}, (1, 2), "25 heads do not divide by 4"),
        (published.QWEN2_7B, {"memory": 12 * GIB, "nodes": 3}, {"device": "cpu"}, (1, 2), "over machines"),
    ],
)
def test_suggestions(
    raw: dict[str, object], machines: dict[str, object], options: dict[str, object], sizes: tuple[int, int], reason: str
) -> None:
    found = plan(raw, machines, **options)
    assert found.suggested is not None and found.chosen == found.suggested
    grid = found.suggested.layout
    assert (grid.tp_size, grid.pp_size) == sizes and reason in found.reason
    assert all(0 < rank.total <= rank.room for rank in found.suggested.ranks)
    assert found.suggested.concurrency >= 1 and found.suggested.cache_tokens >= found.config.max_model_len


def test_a_smaller_grid_than_the_suggested_one_does_not_fit() -> None:
    stated = plan(published.LLAMA_70B, {"gpu": "h100"}, tensor_parallel_size=2).chosen
    assert not stated.fits and stated.missing_bytes > 0
    odd = plan(published.LLAMA_70B, {"gpu": "h100"}, tensor_parallel_size=3)  # supported, but not suggested
    assert odd.chosen.fits and odd.suggested is not None and odd.suggested.layout.tp_size == 4


def test_unknown_keys_that_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    odd = published.LLAMA_8B | {"layer_scale": 1.0}
    found = plan(odd, {"gpu": "h100"}, allow_unknown_config="layer_scale")
    assert found.spec == plan(published.LLAMA_8B, {"gpu": "h100"}).spec
    assert [record.message for record in caplog.records] == [
        "config.json: ignored layer_scale; if that changes the computation, answers are wrong"
    ]
    with pytest.raises(ModelError, match="--allow-unknown-config layer_scale"):
        plan(odd, {"gpu": "h100"})


def test_what_a_rank_holds_by_hand() -> None:
    """Llama 8B on 2 x 2: 16 layers per stage, half of every matrix, and whole norms."""
    found = plan(published.LLAMA_8B, {"gpu": "h100"}, tensor_parallel_size=2, pipeline_parallel_size=2).chosen
    width, head_dim, ffn, vocabulary = 4096, 128, 14336, 128256
    attention = (16 + 2 * 4) * head_dim * width + width * 16 * head_dim
    layer = attention + 3 * (ffn // 2) * width + 2 * width
    ends = vocabulary // 2 * width
    layers = [len(rank.layers) for rank in found.ranks]
    assert layers in ([17, 17, 15, 15], [16, 16, 16, 16])
    assert [rank.weights for rank in found.ranks] == [
        2 * (layers[0] * layer + ends),
        2 * (layers[1] * layer + ends),
        2 * (layers[2] * layer + ends + width),
        2 * (layers[3] * layer + ends + width),
    ]
    per_token = 2 * 4 * head_dim * 2  # keys and values of 4 KV heads in one layer
    tokens = found.cache.num_blocks * 16
    assert [rank.kv_cache for rank in found.ranks] == [count * per_token * tokens for count in layers]
    assert found.cache_tokens <= tokens
    assert max(rank.total for rank in found.ranks) <= found.ranks[0].room == int(79.10 * GIB * 0.9 // 1) - (600 << 20)


def test_unequal_shares_are_counted_as_they_are_stated() -> None:
    machines = {"gpu": "h100"}
    even = plan(published.LLAMA_8B, machines, tensor_parallel_size=2).chosen.ranks
    uneven = plan(published.LLAMA_8B, machines, tensor_parallel_size=2, tensor_parallel_split="3,1").chosen.ranks
    assert [rank.heads for rank in uneven] == [24, 8] and [rank.kv_heads for rank in uneven] == [6, 2]
    norms = 2 * 65 * 4096  # bytes, whole on both ranks
    assert uneven[0].weights - norms == pytest.approx(1.5 * (even[0].weights - norms), rel=0.001)
    staged = plan(
        published.LLAMA_8B,
        machines,
        pipeline_parallel_size=2,
        pipeline_parallel_layers=[20, 12],
        kv_cache_memory="8GiB",
    ).chosen
    assert [len(rank.layers) for rank in staged.ranks] == [20, 12]
    assert 0 <= 8 * GIB - staged.ranks[0].kv_cache < staged.cache.block_bytes
    assert staged.ranks[1].kv_cache * 20 == staged.ranks[0].kv_cache * 12


def test_the_cpu_cache_is_that_of_the_daemon() -> None:
    found = plan(published.QWEN2_HALF_B, {"memory": 64 * GIB}, device="cpu", max_model_len=2048).chosen
    one_request = 24 * 2 * 2 * 64 * 2 * 2048
    expected = kv_cache.choose_cpu_cache_bytes(one_request, 1, 64 * GIB)
    assert found.ranks[0].kv_cache == expected // found.cache.block_bytes * found.cache.block_bytes
    shared = plan(published.QWEN2_HALF_B, {"memory": 64 * GIB}, device="cpu", tensor_parallel_size=2).chosen
    assert [rank.room for rank in shared.ranks] == [32 * GIB] * 2


def test_offloaded_blocks_take_room_of_a_cpu_machine() -> None:
    machine = {"memory": 64 * GIB}
    found = plan(published.QWEN2_HALF_B, machine, device="cpu", kv_offload_memory="40GiB").chosen.ranks[0]
    assert found.room == 24 * GIB
    card = plan(published.LLAMA_8B, {"gpu": "h100"}).chosen.ranks
    assert plan(published.LLAMA_8B, {"gpu": "h100"}, kv_offload_memory="40GiB").chosen.ranks == card


def test_data_parallel_engines_share_the_machines() -> None:
    alone = plan(published.QWEN2_HALF_B, {"memory": 64 * GIB}, device="cpu").chosen.ranks[0]
    shared = plan(published.QWEN2_HALF_B, {"memory": 64 * GIB}, device="cpu", data_parallel_size=2).chosen.ranks[0]
    assert (shared.weights, shared.room) == (alone.weights, alone.room // 2)
    needs_four = plan(published.LLAMA_70B, {"gpu": "h100"}, data_parallel_size=2)
    assert needs_four.suggested is not None and needs_four.suggested.layout.tp_size == 4
    three = plan(published.LLAMA_70B, {"gpu": "h100"}, data_parallel_size=3)
    assert three.suggested is None and three.nodes_needed == 2


def test_engines_that_share_out_experts() -> None:
    """Mixtral 8x7B has 93.4 GB of weights, of which 90.2 GB are experts."""
    shared = {"enable_expert_parallel": True, "max_model_len": "8k"}
    found = plan(published.MIXTRAL_8X7B, {"gpu": "h100", "nodes": 2}, data_parallel_size=4, **shared)
    assert found.suggested is not None and found.suggested.layout == ParallelLayout()
    assert found.suggested.ranks[0].weights / 1e9 == pytest.approx(93.4 - 90.2 * 3 / 4, abs=0.1)
    alone = plan(published.MIXTRAL_8X7B, {"gpu": "h100", "nodes": 2}, max_model_len="8k", data_parallel_size=4)
    assert alone.suggested is not None and alone.suggested.layout.tp_size == 2
    stages = plan(published.MIXTRAL_8X7B, {"gpu": "l4", "nodes": 2}, data_parallel_size=2, **shared).suggested
    assert stages is not None and stages.layout == ParallelLayout(1, 4)
    assert plan(published.MIXTRAL_8X7B, {"gpu": "l4", "nodes": 2}, data_parallel_size=8, **shared).suggested is None
    two_each = {"data_parallel_size": 8, "tensor_parallel_size": 2}
    assert plan(published.MIXTRAL_8X7B, {"gpu": "h100", "nodes": 2}, **two_each, **shared).chosen.fits
    assert plan(published.MIXTRAL_8X7B, {"gpu": "h100"}, **two_each, **shared).chosen.missing_devices == 8


def test_where_nothing_fits() -> None:
    found = plan(published.LLAMA_405B, {"gpu": "h100"})
    assert found.suggested is None and not found.chosen.fits and found.nodes_needed == 2
    assert (found.chosen.layout.tp_size, found.chosen.layout.pp_size) == (8, 1)
    enough = plan(published.LLAMA_405B, {"gpu": "h100", "nodes": found.nodes_needed})
    assert enough.suggested is not None
    hopeless = plan(published.LLAMA_405B, {"memory": GIB})
    assert hopeless.suggested is None and hopeless.nodes_needed is None


def test_a_short_context_fits_where_a_long_one_does_not() -> None:
    machines: dict[str, object] = {"memory": 24 * GIB, "gpus_per_node": 1}
    long = plan(published.LLAMA_8B, machines)
    assert long.suggested is None and 0 < long.chosen.cache_tokens < 131072
    short = plan(published.LLAMA_8B, machines, max_model_len=long.chosen.cache_tokens)
    assert short.chosen.fits


@pytest.mark.parametrize(
    ("machines", "options", "message"),
    [
        ({"gpu": "h100", "memory": GIB}, {}, "--gpu and --memory"),
        ({"gpu": "h100"}, {"device": "cpu"}, "exclude each other"),
        ({}, {"device": "cuda"}, "say which GPU"),
        ({"gpus_per_node": 4}, {}, "--gpus-per-node: say which GPUs"),
        ({"gpu": "h100"}, {"tensor_parallel_size": 513}, "513 ranks, over 512"),
        ({"gpu": "h100", "nodes": 8}, {"pipeline_parallel_size": 33}, "33 stages"),
        ({"gpu": "h100"}, {"max_model_len": "1M"}, "--max-model-len"),
    ],
)
def test_what_cannot_be(machines: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(published.LLAMA_8B, machines, **options)


def test_a_machine_with_gpus_is_not_planned_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_llm.cli.plan.hardware.list_gpus", lambda visible: ["0", "1"])
    with pytest.raises(OptionError, match="name them by --gpu, or use --device cpu"):
        plan(published.QWEN2_HALF_B, {})
    assert plan(published.QWEN2_HALF_B, {"memory": 64 * GIB}, device="cpu").config.device == "cpu"
    assert plan(published.QWEN2_HALF_B, {"gpu": "h100"}).config.device == "cuda"


def test_transformers_own_code_is_not_counted() -> None:
    with pytest.raises(
        OptionError, match=r"^--model-impl: the memory that a model in transformers' own code takes is not known before"
    ):
        make_plan(make_options("m", model_impl="transformers"), HardwareOptions(), {})


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        plan({"architectures": ["MambaForCausalLM"]}, {"gpu": "h100"})


def test_engines_beyond_the_devices_do_not_fit() -> None:
    """Llama 70B needs four H100s for each engine."""
    found = plan(published.LLAMA_70B, {"gpu": "h100"}, data_parallel_size=4)
    assert not found.chosen.fits and found.suggested is None and found.nodes_needed == 2
    alone = plan(published.LLAMA_8B, {"gpu": "h100"}, data_parallel_size=9).chosen
    assert not alone.fits and (alone.missing_bytes, alone.missing_devices) == (0, 1)
    stated = plan(published.LLAMA_8B, {"gpu": "h100"}, data_parallel_size=5, tensor_parallel_size=2)
    assert not stated.chosen.fits and stated.chosen.missing_devices == 2
    assert "5 engines with --tensor-parallel-size 2" in describe_shortage(stated, [])
    single = plan(published.LLAMA_8B, {"gpu": "h100"}, tensor_parallel_size=9)
    expected = "one engine with --tensor-parallel-size 9 --pipeline-parallel-size 1 needs 9 GPUs, but there are 8; use"
    assert expected in describe_shortage(single, [])


def list_remedies(raw: dict[str, object], machines: dict[str, object], **options: object) -> str:
    def again(options: EngineOptions, hardware: HardwareOptions, states_layout: bool) -> MemoryPlan:
        return build_plan(options, hardware, raw, None, states_layout)

    hardware = HardwareOptions(**machines)
    asked = make_options("model", **options)
    found = again(asked, hardware, True)
    return describe_shortage(found, find_remedies(found, asked, hardware, True, again))


def test_formats_that_the_gpus_take_are_suggested() -> None:
    ampere = list_remedies(published.LLAMA_8B, {"gpu": "a10", "gpus_per_node": 1}, max_model_len="8k")
    assert "--quantization int8" not in ampere
    ampere = list_remedies(
        published.LLAMA_8B, {"gpu": "a10", "gpus_per_node": 1}, max_model_len="8k", kv_cache_memory="8GiB"
    )
    assert "use --quantization int8" in ampere and "fp8" not in ampere
    unknown = list_remedies(published.LLAMA_8B, {"memory": 15 * GIB, "gpus_per_node": 1}, max_model_len="8k")
    assert "use --quantization fp8 (on GPUs of compute capability 8.9 or more)" in unknown
    assert "use --quantization int8" in unknown
    hopper = {"gpu": "h100", "gpus_per_node": 1}
    cache = list_remedies(published.LLAMA_8B, hopper, kv_cache_memory="12GiB")
    assert "use --kv-cache-dtype fp8" in cache and "int8" not in cache


def test_an_explicit_size_of_1_counts() -> None:
    stated = make_plan(make_options("m"), HardwareOptions(gpu="h100"), published.LLAMA_70B, states_layout=True)
    assert stated.chosen.layout == ParallelLayout() and not stated.chosen.fits
    assert stated.suggested is not None and stated.suggested.layout.tp_size == 4
    options, _, states_layout, _ = read_command_line(["m", "-tp", "1"], {})
    assert states_layout and options.tensor_parallel_size == 1
    assert read_command_line(["m"], {"SERVE_LLM_PIPELINE_PARALLEL_SIZE": "1"})[2]
    assert not read_command_line(["m", "-dp", "2"], {})[2]


def test_what_is_short_is_said() -> None:
    found = plan(published.LLAMA_70B, {"gpu": "h100"}, data_parallel_size=4)
    (rank,) = {rank.total for rank in found.chosen.ranks}
    request = found.chosen.blocks_per_request * found.chosen.cache.block_bytes
    first = found.chosen.ranks[0]
    assert found.chosen.missing_bytes == first.weights + first.activations + request - first.room
    assert found.chosen.missing_for == "weights, one step, and the KV cache of one request of 131,072 tokens"
    assert rank == first.weights + first.activations + first.kv_cache


def test_adapters_take_room() -> None:
    """Llama 8B's adapters of rank 16 have 41,943,040 values in the layers, plus those of the embedding and the head;
    products of 1024 rows are those of a feed-forward layer. DoRA has two float32 values for each of the 1,376,256
    outputs and those of the embedding and the head. A GPU holds three slots, and an adapter that is being loaded into
    one."""
    base = plan(published.LLAMA_8B, {"gpu": "h100"}).chosen
    found = plan(published.LLAMA_8B, {"gpu": "h100"}, enable_lora=True, max_loras=3).chosen
    assert base.ranks[0].adapters == 0
    scales = 4 * 2 * (1_376_256 + 4096 + 128_256) * 4
    weights = 4 * (41_943_040 + 2 * 16 * (4096 + 128_256))
    assert found.ranks[0].adapters == (weights + 1024 * (4096 + 14336)) * 2 + scales + 3 * 2**22 * 4
    assert 0 <= base.ranks[0].total - found.ranks[0].total < found.cache.block_bytes
    small = plan(published.LLAMA_8B, {"memory": 24 * GIB}, enable_lora=True, max_lora_rank=512, max_model_len=4096)
    assert small.suggested is not None and small.suggested.layout.size > 1


@pytest.mark.parametrize(("device", "num_held"), [("cpu", 6), ("cuda", 2)])
def test_adapters_in_host_memory_take_room_on_a_cpu(device: str, num_held: int) -> None:
    machine = {"memory": 64 * GIB}
    given: dict[str, object] = {"device": device, "enable_lora": True, "dtype": "float32"}
    found = plan(published.LLAMA_8B, machine, **given, max_loras=2, max_cpu_loras=6).chosen
    expected = plan(published.LLAMA_8B, machine, **given, max_loras=num_held).chosen
    assert found.ranks[0].adapters == expected.ranks[0].adapters


def test_a_draft_model_takes_room_beside_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.LLAMA_1B))
    given: dict[str, object] = {"tensor_parallel_size": 2, "max_model_len": 8192}
    base = plan(published.LLAMA_8B, {"gpu": "h100"}, **given).chosen
    found = plan(published.LLAMA_8B, {"gpu": "h100"}, **given, speculative_config=str(tmp_path)).chosen
    cache = 16 * 8192 * 16 * 2 * 8 * 64 * 2  # requests, tokens, layers, keys and values, KV heads, head_dim, bytes
    taken = [rank.draft_model for rank in found.ranks]
    assert taken[1] == 0 and abs(taken[0] - cache - 1_235_814_400 * 2) < 1 << 20
    lost = base.ranks[0].kv_cache - found.ranks[0].kv_cache
    assert abs(lost - taken[0]) < 2 << 20


@pytest.mark.parametrize("stages", [1, 2])
def test_each_rank_of_the_last_stage_holds_a_shard_of_a_draft_model(stages: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.LLAMA_1B))
    given: dict[str, object] = {"tensor_parallel_size": 2, "pipeline_parallel_size": stages, "max_model_len": 8192}
    config = {"model": str(tmp_path), "draft_tensor_parallel_size": 2}
    found = plan(published.LLAMA_8B, {"gpu": "h100"}, **given, speculative_config=config).chosen
    cache = 16 * 8192 * 16 * 2 * 4 * 64 * 2  # requests, tokens, layers, keys and values, KV heads, head_dim, bytes
    taken = [rank.draft_model for rank in found.ranks]
    assert taken[:-2] == [0] * (len(taken) - 2) and len(taken) == 2 * stages
    for one in taken[-2:]:
        assert one - cache == pytest.approx(1_235_814_400 * 2 / 2, rel=0.01)


def test_a_head_takes_room_beside_the_first_rank(tmp_path: Path) -> None:
    """The published EAGLE-3 head for Llama 3.1 8B has 424,689,664 parameters, and reads the model's embedding."""
    head = published.LLAMA_8B | {"num_hidden_layers": 1, "draft_vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(head))
    config = {"method": "eagle3", "model": str(tmp_path)}
    given: dict[str, object] = {"enforce_eager": True, "max_model_len": 8192}
    found = plan(published.LLAMA_8B, {"gpu": "h100"}, **given, speculative_config=config).chosen
    cache = 16 * 8192 * 2 * 8 * 128 * 2  # requests, tokens, keys and values, KV heads, head_dim, bytes
    assert abs(found.ranks[0].draft_model - cache - 2 * (424_689_664 + 128_256 * 4096)) < 1 << 20
    with pytest.raises(OptionError, match="captured CUDA graphs do not give out hidden states; add --enforce-eager"):
        plan(published.LLAMA_8B, {"gpu": "h100"}, speculative_config=config)


def test_an_mtp_layer_takes_room_beside_the_first_rank() -> None:
    """GLM-4.5-Air's MTP layer has 2.375 billion parameters besides the model's embedding and LM head. It works with
    stages."""
    given: dict[str, object] = {"enforce_eager": True, "max_model_len": 8192, "tensor_parallel_size": 4}
    found = plan(published.GLM_4_5_AIR, {"gpu": "h200"}, **given, speculative_config="mtp").chosen
    cache = 16 * 8192 * 2 * 8 * 128 * 2  # requests, tokens, keys and values, KV heads, head_dim, bytes
    shared = 2 * 151_552 * 4096
    taken = [rank.draft_model for rank in found.ranks]
    assert taken[1:] == [0, 0, 0]
    assert (taken[0] - cache) / 2 - shared == pytest.approx(2.375e9, rel=0.005)
    stages = plan(
        published.GLM_4_5_AIR, {"gpu": "h200"}, **given, pipeline_parallel_size=2, speculative_config="mtp"
    ).chosen
    assert stages.ranks[0].draft_model == taken[0]


def test_stages_for_a_head(tmp_path: Path) -> None:
    head = published.LLAMA_8B | {"num_hidden_layers": 1, "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(head))
    plain = plan(published.LLAMA_8B, {"gpu": "l4"}, enforce_eager=True).suggested
    assert plain is not None and plain.layout.pp_size == 2
    config = {"method": "eagle3", "model": str(tmp_path)}
    found = plan(published.LLAMA_8B, {"gpu": "l4"}, enforce_eager=True, speculative_config=config).suggested
    assert found is not None and found.layout.pp_size == 3


def test_fp8_is_for_gpus_that_multiply_it() -> None:
    assert plan(published.LLAMA_8B, {"gpu": "l4"}, quantization="fp8").suggested is not None
    with pytest.raises(OptionError, match="--quantization: a a100-40g does not multiply 8-bit floats"):
        plan(published.LLAMA_8B, {"gpu": "a100-40g"}, quantization="fp8")


def test_host_memory_in_which_no_block_fits() -> None:
    """A block takes 2 MiB; with two tensor-parallel ranks, each holds half of it."""
    options = make_options("model", kv_offload_memory="1MiB")
    found = build_plan(options, HardwareOptions(gpu="h100"), published.LLAMA_8B, None, states_layout=True)
    assert (found.chosen.missing_bytes, found.chosen.missing_for) == (2**20, "one block in --kv-offload-memory")
    assert found.suggested is not None and found.suggested.layout == ParallelLayout(2, 1)


def test_the_tokenizer_of_a_draft_model_is_compared_where_it_is_at_hand(tmp_path: Path) -> None:
    for name, token in (("model", "a"), ("draft", "b")):
        (tmp_path / name).mkdir()
        vocabulary = {"type": "WordLevel", "vocab": {token: 0}, "unk_token": token}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocabulary}))
        (tmp_path / name / "config.json").write_text(json.dumps(published.LLAMA_1B))
    options = make_options("model", speculative_config=str(tmp_path / "draft"))
    hardware = HardwareOptions(gpu="h100")
    with pytest.raises(ModelError, match="has another tokenizer"):
        build_plan(options, hardware, published.LLAMA_8B, tmp_path / "model")
    assert build_plan(options, hardware, published.LLAMA_8B, tmp_path).chosen.fits
