"""How options are resolved for one model on one device."""

import dataclasses
from typing import Any

import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.options.default_speculation import DEFAULT_SPECULATION, explain_default_off
from serve_llm.common.options.parsers import parse_kv_cache_dtype
from serve_llm.common.options.sources import make_options
from serve_llm.common.options.speculative import SpeculativeConfig
from serve_llm.engine.config import Config, check_options, resolve


def decide(
    device: str = "cpu",
    checkpoint_dtype: str = "bfloat16",
    model_max_len: int = 4096,
    stores_int8: bool = False,
    has_experts: bool = False,
    has_states: bool = False,
    generates: bool = True,
    executor_backend: str | None = None,
    **options: object,
) -> Config:
    said = make_options("demo", **options)
    check_options(said, model_max_len, 24, has_experts)
    return resolve(
        said,
        "/models/demo",
        device=device,
        checkpoint_dtype=checkpoint_dtype,
        model_max_len=model_max_len,
        stores_int8=stores_int8,
        has_states=has_states,
        generates=generates,
        executor_backend=executor_backend or ("mp" if said.tensor_parallel_size > 1 else "inprocess"),
    )


def test_defaults() -> None:
    assert decide() == Config(
        directory="/models/demo",
        load_format="auto",
        device="cpu",
        enforce_eager=False,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        block_size=16,
        kv_cache_memory=None,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=True,
        data_parallel_size=1,
        seed=0,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        tensor_parallel_split=None,
        pipeline_parallel_layers=None,
        enable_expert_parallel=False,
        executor_backend="inprocess",
        speculation=DEFAULT_SPECULATION,
    )


def test_prompt_lookup_is_on_where_it_cannot_lose() -> None:
    assert DEFAULT_SPECULATION.method == "ngram" and DEFAULT_SPECULATION.disable_by_batch_size == 2
    for options in ({}, {"tensor_parallel_size": 2}, {"quantization": "int8"}, {"data_parallel_size": 2}):
        assert decide(**options).speculation == DEFAULT_SPECULATION
        assert decide(**options, speculative_config="none").speculation is None
    assert decide(speculative_config="ngram").speculation == SpeculativeConfig(method="ngram")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cuda"}, "GPUs has not been measured; --speculative-config ngram turns it on"),
        ({"pipeline_parallel_size": 2}, "pipeline stages has not been measured"),
        ({"nnodes": 2, "master_addr": "10.0.0.1:29500", "tensor_parallel_size": 2}, "several hosts"),
        (
            {"has_experts": True, "enable_expert_parallel": True, "data_parallel_size": 2},
            "wait for each other's drafts",
        ),
        ({"model_impl": "transformers"}, "transformers' own code"),
    ],
)
def test_prompt_lookup_is_off_elsewhere(options: dict[str, Any], reason: str) -> None:
    assert decide(**options).speculation is None
    chosen = make_options(
        "demo", **{key: value for key, value in options.items() if key not in ("device", "has_experts")}
    )
    why = explain_default_off(chosen, options.get("device", "cpu"), has_states=False)
    assert why is not None and reason in why
    if "device" not in options:
        assert decide(**options, speculative_config="ngram").speculation == SpeculativeConfig(method="ngram")


@pytest.mark.parametrize("ranks", [1, 2])
def test_prompt_lookup_is_off_for_ranks_that_ray_may_place_on_several_hosts(ranks: int) -> None:
    chosen = make_options("demo", tensor_parallel_size=ranks)
    config = decide(tensor_parallel_size=ranks, executor_backend="ray")
    assert config.speculation == (DEFAULT_SPECULATION if ranks == 1 else None)
    assert ("Ray" in str(explain_default_off(chosen, "cpu", False, "ray"))) == (ranks == 2)


def test_prompt_lookup_is_off_for_linear_attention_and_vectors() -> None:
    chosen = make_options("demo")
    assert decide(has_states=True).speculation is None
    assert decide(generates=False).speculation is None
    assert "linear attention" in str(explain_default_off(chosen, "cpu", has_states=True))
    assert decide("cuda").max_num_batched_tokens == 8192


def test_what_the_user_says_wins() -> None:
    said = {
        "max_model_len": 4096,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 5,
        "block_size": 128,
        "kv_cache_memory": 1024,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "data_parallel_size": 3,
        "seed": 7,
        "load_format": "dummy",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        "allow_unknown_config": ("layer_scale",),
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "tensor_parallel_split": (3.0, 1.0),
        "pipeline_parallel_layers": (9, 8, 7),
    }
    config = dataclasses.asdict(decide(**said))
    assert {name: config[name] for name in said} == said


@pytest.mark.parametrize(
    ("device", "asked", "checkpoint", "dtype"),
    [
        ("cpu", "auto", "bfloat16", "bfloat16"),
        ("cpu", "auto", "float16", "bfloat16"),
        ("cpu", "auto", "float32", "float32"),
        ("cuda", "auto", "bfloat16", "bfloat16"),
        ("cuda", "auto", "float16", "float16"),
        ("cuda", "auto", "float32", "float32"),
        ("cuda", "float16", "float32", "float16"),
        ("cpu", "float32", "bfloat16", "float32"),
        ("cpu", "bfloat16", "float8_e4m3fn", "bfloat16"),
    ],
)
def test_dtype(device: str, asked: str, checkpoint: str, dtype: str) -> None:
    assert decide(device, checkpoint, dtype=asked).dtype == dtype


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantization(device: str) -> None:
    assert decide(device).quantization == "none"
    assert decide(device, stores_int8=True).quantization == "int8"
    for asked in ("int8", "int4", "int4-g32", "fp8"):
        config = decide(device, quantization=asked)
        assert config.quantization == asked and asked in config.types
    for asked in ("int4", "fp8"):
        with pytest.raises(OptionError, match=f"^--quantization: the checkpoint is quantised already .* made {asked}"):
            decide(device, stores_int8=True, quantization=asked)


def test_fp8_rounds_activations_on_gpus_in_bfloat16() -> None:
    assert decide("cuda", quantization="fp8").rounds_to_fp8
    assert decide("cuda", "float16", quantization="fp8", dtype="bfloat16").rounds_to_fp8
    assert not decide("cuda", "float16", quantization="fp8").rounds_to_fp8
    assert not decide("cuda", quantization="fp8", batch_invariant=True).rounds_to_fp8
    assert not decide("cpu", quantization="fp8").rounds_to_fp8


def test_an_int8_cache_is_for_cpus() -> None:
    assert decide(kv_cache_dtype="int8").types == "bfloat16 with KV cache in int8"
    assert decide(kv_cache_dtype="int8", quantization="int8").types == "bfloat16 with layers and KV cache in int8"
    assert decide("cuda", kv_cache_dtype="auto").types == "bfloat16"
    with pytest.raises(
        OptionError, match=r"^--kv-cache-dtype: int8 is served on a CPU only; use fp8 or auto, or --device cpu"
    ):
        decide("cuda", kv_cache_dtype="int8")


def test_an_fp8_cache_is_for_gpus() -> None:
    for spelling in ("fp8", "fp8_e4m3", "FP8"):
        config = decide("cuda", kv_cache_dtype=parse_kv_cache_dtype(spelling))
        assert config.types == "bfloat16 with KV cache in fp8" and config.kv_cache_format.num_bytes(64) == 64
    assert decide("cuda", kv_cache_dtype="fp8", quantization="fp8").types == "bfloat16 with layers and KV cache in fp8"
    both = decide("cuda", kv_cache_dtype="fp8", quantization="int4")
    assert both.types == "bfloat16 with layers in int4 and KV cache in fp8"
    with pytest.raises(OptionError, match=r"^--kv-cache-dtype: fp8 is served on GPUs only; use int8 or auto, or "):
        decide(kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"fp8 with 5 bits of exponent is not supported; fp8 is e4m3"):
        parse_kv_cache_dtype("fp8_e5m2")


def test_float16_on_a_cpu_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--dtype.*float16.*CPU.*bfloat16"):
        decide("cpu", dtype="float16")


def test_unknown_checkpoint_type() -> None:
    with pytest.raises(ModelError, match=r"float64.*--dtype"):
        decide(checkpoint_dtype="float64")


def test_longer_than_the_model() -> None:
    with pytest.raises(OptionError, match=r"--max-model-len: 4097 .* 4096"):
        decide(max_model_len=4097)


def test_expert_parallel_needs_experts_and_ranks() -> None:
    said = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    assert decide(**said, has_experts=True).enable_expert_parallel
    with pytest.raises(OptionError, match=r"^--enable-expert-parallel: this model has no experts"):
        decide(**said)
    with pytest.raises(OptionError, match=r"^--enable-expert-parallel: one rank has all experts anyway"):
        decide(enable_expert_parallel=True, pipeline_parallel_size=2, has_experts=True)


def test_engines_that_share_out_experts() -> None:
    two = {"data_parallel_size": 2, "has_experts": True}
    assert decide(**two, enable_expert_parallel=True).expert_engines == 2
    assert decide(**two).expert_engines == 1
    assert decide(**two, enable_expert_parallel=True, pipeline_parallel_size=2).expert_engines == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3, "tensor_parallel_split": "3,1"}, "--tensor-parallel-split: 2 shares, .* 3"),
        ({"tensor_parallel_split": "3,1"}, "--tensor-parallel-split: 2 shares, but --tensor-parallel-size is 1"),
        ({"pipeline_parallel_size": 25}, "--pipeline-parallel-size: 25 stages, but the model has only 24 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_layers": "9,8,7"}, "--pipeline-parallel-layers: 3 numbers"),
        ({"pipeline_parallel_size": 3, "pipeline_parallel_layers": "9,8,8"}, "25 layers in all, .* 24 layers"),
    ],
)
def test_shares_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        decide(**options)


def test_attention_backends_are_for_gpus() -> None:
    assert decide().attention_backend == decide("cuda").attention_backend == "auto"
    assert decide("cuda", attention_backend="flash").attention_backend == "flash"
    assert decide("cuda", attention_backend="triton", batch_invariant=True).attention_backend == "triton"
    with pytest.raises(OptionError, match=r"^--attention-backend: triton is for GPUs; omit it, or use --device cuda$"):
        decide(attention_backend="triton")
    with pytest.raises(OptionError, match=r"^--attention-backend: .* --batch-invariant rules out; omit one of them$"):
        decide("cuda", attention_backend="flash", batch_invariant=True)


def test_symmetric_all_reduce_is_for_gpus_of_a_group_that_may_differ_in_bits() -> None:
    assert decide("cuda", tensor_parallel_size=2).all_reduce == "nccl"
    assert decide("cuda", tensor_parallel_size=2, all_reduce="symmetric").all_reduce == "symmetric"
    for why, device, options in (
        ("is for GPUs", "cpu", {"tensor_parallel_size": 2}),
        ("one rank has nothing to sum", "cuda", {}),
        ("--batch-invariant", "cuda", {"tensor_parallel_size": 2, "batch_invariant": True}),
        ("float16", "cuda", {"tensor_parallel_size": 2, "dtype": "float16"}),
    ):
        with pytest.raises(OptionError, match=f"^--all-reduce: .*{why}"):
            decide(device, all_reduce="symmetric", **options)
