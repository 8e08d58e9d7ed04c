"""The promises of `plan` hold: a deployment that fits starts, and suggestions and advice fit when they are followed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_llm.cli.plan.hardware import GPU_MODELS, HardwareOptions
from serve_llm.cli.plan.planner import MemoryPlan, build_plan
from serve_llm.cli.plan.remedies import Remedy, describe_shortage, find_remedies
from serve_llm.common.errors import CapacityError, ServeError
from serve_llm.common.hub import read_config
from serve_llm.common.options.combinations import check_combinations
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.devices import claim_gpus
from serve_llm.engine.distributed.choose import ExecutorChoice
from serve_llm.engine.distributed.ray.placement import RayNode, place_ranks
from serve_llm.engine.model.lora_targets import find_served_targets
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.stored_quantization import accept_stored_format
from serve_llm.engine.worker import kv_cache
from support import packed, packed_floats, published, quantised
from support.engine import make_engine
from support.tiny import make_checkpoint

GIB = 2**30
MODEL = Path("model")
FIXED_MODELS = (
    published.LLAMA_1B,
    published.LLAMA_8B,
    published.LLAMA_70B,
    published.LLAMA_405B,
    published.QWEN2_7B,
    published.GEMMA3_1B,
    published.GPT2_XL | {"torch_dtype": "float32"},
    published.OPT_30B,
    published.MIXTRAL_8X7B,
    published.GLM_4_5_AIR,
    published.LLAMA_1B | {"quantization_config": {"quant_method": "gguf", "architecture": "llama"}},
)
PACKED: tuple[dict[str, Any], ...] = (
    *(
        packed.quantization_config(packing)
        for packing in (
            packed.Packing("awq", group_size=128),
            packed.Packing("gptq", has_order=True, is_symmetric=True, group_size=128),
            packed.Packing("gptq", bits=8, group_size=32),
            packed.Packing("compressed", group_size=0),
        )
    ),
    *(packed_floats.CONFIGS[form] for form in ("fp8-block", "autofp8", "nvfp4", "nf4", "bitsandbytes-int8")),
    quantised.quantization_config(["lm_head", "re:.*gate$"]),
)
random_models = st.builds(
    lambda base, sizes, heads, packing: (
        base
        | sizes
        | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        | ({} if packing is None else {"quantization_config": packing})
    ),
    st.sampled_from([published.LLAMA_8B, published.QWEN2_7B, published.GEMMA3_1B, published.MIXTRAL_8X7B]),
    st.fixed_dictionaries(
        {
            "hidden_size": st.sampled_from([512, 896, 2048, 5120, 8192]),
            "intermediate_size": st.integers(4, 200).map(lambda count: count * 128),
            "num_hidden_layers": st.integers(1, 90),
            "head_dim": st.sampled_from([64, 128]),
            "vocab_size": st.integers(1000, 260_000),
            "tie_word_embeddings": st.booleans(),
        }
    ),
    st.sampled_from([(3, 1), (8, 8), (14, 2), (40, 8), (64, 4)]),
    st.sampled_from([None, *PACKED]),
)
models = st.one_of(st.sampled_from(FIXED_MODELS), random_models)
CONFLICTS = re.compile(  # combinations that the server refuses too
    "this model has no experts|the checkpoint is quantised already|does not multiply 8-bit floats|"
    "tokens that this model allows|adapters do not apply to GGUF|adapters are served by the ranks of one host|"
    "one rank has all experts anyway|MTP layers of|the checkpoint has no MTP layer|do not give out hidden states|"
    "has another tokenizer"
)
DRAFTS = {"same": "a", "other": "b"}  # directory of a draft model -> its tokenizer's only token


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a working directory with "model", which has a tokenizer and no weights, and the draft models."""
    home = tmp_path_factory.mktemp("promises")
    for name, token in {"model": "a", **DRAFTS}.items():
        (home / name).mkdir()
        vocabulary = {"type": "WordLevel", "vocab": {token: 0}, "unk_token": token}
        (home / name / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocabulary}))
        (home / name / "config.json").write_text(json.dumps(published.LLAMA_1B))
        (home / name / "model.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield home


def plan_and_advise(
    options: Options, hardware: HardwareOptions, raw: dict[str, object], states_layout: bool
) -> tuple[MemoryPlan, list[Remedy]]:
    def again(options: Options, hardware: HardwareOptions, states_layout: bool) -> MemoryPlan:
        return build_plan(options, hardware, raw, MODEL, states_layout)

    plan = again(options, hardware, states_layout)
    return plan, find_remedies(plan, options, hardware, states_layout, again)


def try_devices(options: Options, plan: MemoryPlan, raw: dict[str, object]) -> None:
    """Run the engines' checks before they load weights, on machines as planned. Raises ServeError."""
    hardware, layout = plan.hardware, plan.chosen.layout
    sizes = {"tensor_parallel_size": layout.tp_size, "pipeline_parallel_size": layout.pp_size}
    stated = replace(options, **sizes)  # type: ignore[arg-type]
    check_combinations(stated)
    settled = accept_stored_format(stated, raw)
    num_ranks = layout.size * options.data_parallel_size
    hosts = min(num_ranks, hardware.nodes) if plan.config.device == "cpu" else -(-num_ranks // hardware.ranks_per_node)
    if hosts > 1:
        check_combinations(replace(stated, nnodes=hosts, master_addr="10.0.0.1:29500"))
    with tempfile.TemporaryDirectory() as empty:
        spec, weights = startup.read_spec(settled, str(MODEL), raw)
        choice = ExecutorChoice("mp", "a test", plan.config.device)
        config, spec = startup.resolve_config(settled, str(MODEL), raw, spec, choice)
        assert isinstance(spec, ModelSpec)
        assert (config.types, config.max_model_len) == (plan.config.types, plan.config.max_model_len)
        if config.max_loras:
            find_served_targets(config, spec, weights)
        if config.speculation is not None and config.speculation.has_draft_model:
            startup.find_draft_model(settled, config)
        if config.kv_offload_memory is not None:
            shards = [build_shard(spec, layout, rank) for rank in range(layout.size)]
            caches = [kv_cache.plan_empty_cache(spec, shard, config) for shard in shards]
            slots = min(config.kv_offload_memory // cache.block_bytes for cache in caches)
            kv_cache.check_offload([replace(cache, num_slots=slots) for cache in caches], config.kv_offload_memory)
        if config.device == "cpu":
            if layout.size > 1:
                kv_cache.check_ranks(-(-layout.size // hardware.nodes), hardware.memory)
            return
        for number in range(hardware.ranks_per_node):
            (Path(empty) / f"nvidia{number}").touch()
        nodes = [
            RayNode(str(number), f"10.0.0.{number + 1}", hardware.ranks_per_node, hardware.ranks_per_node)
            for number in range(hardware.nodes)
        ]
        for engine in range(options.data_parallel_size):
            if hardware.nodes == 1:
                claim_gpus({}, engine, options.data_parallel_size, layout.size, Path(empty))
            places = place_ranks(nodes, layout, "GPU")
            taken = [place.id for place in places]
            nodes = [replace(node, free=node.free - taken.count(node.id)) for node in nodes]


def check_fits(options: Options, plan: MemoryPlan, raw: dict[str, object]) -> None:
    chosen = plan.chosen
    assert chosen.fits and chosen.concurrency >= 1
    assert all(rank.weights + rank.activations <= rank.room for rank in chosen.ranks)
    try_devices(options, plan, raw)


machines = st.one_of(
    st.fixed_dictionaries({"gpu": st.sampled_from(sorted(GPU_MODELS))}),
    st.fixed_dictionaries({"memory": st.integers(1, 200).map(lambda size: size * GIB)}),
).flatmap(
    lambda device: st.fixed_dictionaries(
        {"gpus_per_node": st.sampled_from([1, 3, 4, 8]), "nodes": st.integers(1, 3), "nvlink": st.booleans()}
    ).map(lambda more: device | more)
)
common = {
    "max_model_len": st.sampled_from([None, 512, 8192]),
    "kv_cache_memory": st.sampled_from([None, None, "2GiB"]),
    "dtype": st.sampled_from(["auto", "bfloat16", "float32"]),
    "enable_lora": st.sampled_from([False, False, False, True]),
    "speculative_config": st.sampled_from([None, None, None, None, "ngram", "mtp", *DRAFTS]),
    "kv_offload_memory": st.sampled_from([None, None, None, "100KiB", "1GiB"]),
}
layouts = st.one_of(st.just({}), st.fixed_dictionaries({"tensor_parallel_size": st.sampled_from([1, 2, 4, 5])}))
gpu_options = st.fixed_dictionaries(
    common
    | {
        "data_parallel_size": st.sampled_from([1, 1, 2, 3, 9]),
        "quantization": st.sampled_from(["auto", "auto", "fp8", "int4", "int8"]),
        "enable_expert_parallel": st.sampled_from([False, False, True]),
        "batch_invariant": st.booleans(),
        "enforce_eager": st.booleans(),
    }
)
cpu_options = st.fixed_dictionaries(
    common
    | {
        "device": st.just("cpu"),
        "data_parallel_size": st.sampled_from([1, 1, 2]),
        "quantization": st.sampled_from(["auto", "int8", "int4", "fp8"]),
        "kv_cache_dtype": st.sampled_from(["auto", "int8"]),
    }
)
cpu_machines = st.fixed_dictionaries(
    {"memory": st.integers(1, 400).map(lambda size: size * GIB // 2), "nodes": st.integers(1, 3)}
)


def check_promises(
    raw: dict[str, object], machine: dict[str, Any], chosen: dict[str, Any], layout: dict[str, int]
) -> None:
    hardware = HardwareOptions(**machine)
    try:
        options = make_options("model", **chosen, **layout)
        plan, remedies = plan_and_advise(options, hardware, raw, bool(layout))
    except ServeError as error:
        assert CONFLICTS.search(str(error)), error
        return
    if plan.chosen.fits:
        check_fits(options, plan, raw)
        assert not remedies
    else:
        assert "does not fit" in describe_shortage(plan, remedies)
    if plan.suggested is not None:
        grid = plan.suggested.layout
        sizes = {"tensor_parallel_size": grid.tp_size, "pipeline_parallel_size": grid.pp_size}
        followed = make_options("model", **(chosen | sizes))
        check_fits(followed, build_plan(followed, hardware, raw, MODEL, True), raw)
    for remedy in remedies:
        followed_options, followed_hardware = remedy.apply(options, hardware)
        check_fits(followed_options, build_plan(followed_options, followed_hardware, raw, MODEL, True), raw)


@settings(max_examples=40, deadline=None)
@given(models, machines, gpu_options, layouts)
def test_promises_about_gpus(
    raw: dict[str, object], machine: dict[str, Any], chosen: dict[str, Any], layout: dict[str, int]
) -> None:
    check_promises(raw, machine, chosen, layout)


@settings(max_examples=15, deadline=None)
@given(models, cpu_machines, cpu_options, layouts)
def test_promises_about_cpus(
    raw: dict[str, object], machine: dict[str, Any], chosen: dict[str, Any], layout: dict[str, int]
) -> None:
    check_promises(raw, machine, chosen, layout)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    directory = tmp_path_factory.mktemp("plan")
    make_checkpoint(directory, "llama", dtype="bfloat16", hidden_size=96, head_dim=16, max_position_embeddings=2048)
    return directory, read_config(directory)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    share=st.floats(0.2, 2.0),
    layout=st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1)]),
    quantization=st.sampled_from(["auto", "int4"]),
    kv_cache_dtype=st.sampled_from(["auto", "int8"]),
)
def test_engines_start_in_the_memory_in_which_they_fit(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: tuple[Path, dict[str, object]],
    share: float,
    layout: tuple[int, int],
    quantization: str,
    kv_cache_dtype: str,
) -> None:
    """Real engines start on a machine where each rank's free memory is what its weights leave."""
    directory, raw = checkpoint
    formats = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    chosen: dict[str, Any] = formats | {"device": "cpu", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    options = make_options(str(directory), **chosen, tensor_parallel_size=layout[0], pipeline_parallel_size=layout[1])
    monkeypatch.setattr(kv_cache, "RANK_BYTES", 0)  # the ranks are threads
    needed = build_plan(options, HardwareOptions(memory=GIB), raw, directory, True).chosen
    request_bytes = needed.blocks_per_request * needed.cache.block_bytes
    memory = int(share * len(needed.ranks) * (needed.ranks[0].weights + 3 * request_bytes))
    planned = build_plan(options, HardwareOptions(memory=memory), raw, directory, True)
    plan, config = planned.chosen, planned.config
    held = len(plan.ranks) * max(rank.weights for rank in plan.ranks)
    monkeypatch.setattr(kv_cache, "find_free_memory", lambda: max(0, memory - held))

    def start() -> None:
        sizes = {"tensor": layout[0], "pipeline": layout[1]}
        engine = make_engine(directory, **sizes, kv_cache_memory=None, load_format="dummy", **chosen)
        kv_cache.check_capacity(
            engine._executor.kv_cache_config, config.max_model_len, config.max_num_batched_tokens, config.device
        )

    if plan.fits:
        start()
    elif plan.cache.num_blocks < plan.blocks_per_request:
        with pytest.raises(CapacityError, match="the KV cache has room for"):
            start()
