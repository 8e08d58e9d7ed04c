"""The bytes counted for weights of 4 and 8 bits are those that ranks hold, for packed checkpoints and for weights
quantised while loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.engine.model.cache_scales import add_cache_scales
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights import load
from serve_llm.engine.worker.worker import Worker
from serve_llm.kernels import registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from support import packed_floats, published, resident
from support.gguf_files import make_gguf
from support.mxfp4_files import make_mxfp4
from support.packed import HEADS, SIZES, Packing, make_packed, quantization_config
from support.quantised import edit_config, is_linear
from support.ranks import Ranks, run_together
from support.resolved import resolve_all
from support.tiny import make_checkpoint
from support.triton import NO_TRITON

pytestmark = pytest.mark.skipif(library.find() is None, reason="the plan is for the compiled kernels")
GRIDS = [(1, 1), (2, 1), (3, 1), (1, 2)]


@pytest.fixture(autouse=True)
def panels_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.find()
    assert path is not None
    monkeypatch.setattr("serve_llm.cli.plan.parameters.PANEL_OUTPUTS", GroupQuantPacker(library.Library(path)).columns)


def count_held(directory: Path, layout: ParallelLayout, device: str, **options: object) -> tuple[list[int], list[int]]:
    """Return the bytes that each rank holds, and the counted ones. device: whose kernels the weights are packed for."""
    sizes = {"tensor_parallel_size": layout.tp_size, "pipeline_parallel_size": layout.pp_size}
    chosen = make_options(str(directory), device="cpu", kv_cache_memory="1MiB", **sizes, **options)
    config, spec, weight_map = resolve_all(chosen, str(directory), read_config(directory))
    ranks = Ranks(spec, layout)

    def load(rank: int) -> int:
        worker = Worker(config, spec, weight_map, ranks.shards[rank], ranks.neighbours[rank])
        return resident.weight_bytes(worker._decoder)

    counted = [weight_bytes(spec, shard, config.element_bytes, device).held for shard in ranks.shards]
    return run_together(layout.size, load, ranks.abort), counted


def check(directory: Path, device: str = "cpu", **options: object) -> None:
    """Check with the weights of the checkpoint, and on two ranks with random ones."""
    for tensor, pipeline in GRIDS:
        for load_format in ("auto", "dummy") if tensor == 2 else ("auto",):
            chosen = {"load_format": load_format, **options}
            held, counted = count_held(directory, ParallelLayout(tensor, pipeline), device, **chosen)
            if device == "cpu":
                assert held == counted
            else:  # the values of a rank's experts are not counted
                assert all(0 <= one - other <= 64 for one, other in zip(held, counted, strict=True))


@pytest.mark.parametrize(
    "packing",
    [
        Packing("awq"),
        Packing("gptq", is_symmetric=True, group_size=32),
        Packing("gptq", has_order=True, is_symmetric=True),
        Packing("compressed", bits=8, group_size=0, is_symmetric=True),
    ],
    ids=str,
)
def test_packed_checkpoints(packing: Packing, tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", packing)
    check(tmp_path / "packed")


@pytest.mark.parametrize(("family", "numbers"), [("llama", 2 * 2), ("deepseek_v3", 1)])
def test_scales_of_the_kv_cache(family: str, numbers: int, tmp_path: Path) -> None:
    """Two float32 scales for each of the rank's KV heads; one for latent rows."""
    make_checkpoint(tmp_path, family)
    spec, _ = read_model(read_config(tmp_path))
    shard = build_shard(spec, ParallelLayout(2), rank=1)
    held = [weight_bytes(each, shard, 2, "cuda").held for each in (spec, add_cache_scales(spec))]
    assert held[1] - held[0] == 4 * numbers * len(spec.layers)


def test_activations_that_autoawq_scales(tmp_path: Path) -> None:
    make_packed(tmp_path, "gpt_neox", Packing("awq", scales_activations=True))
    check(tmp_path / "packed")


@pytest.mark.parametrize(
    ("family", "storage"), [("llama", "Q4_K"), ("phi3", "Q6_K"), ("qwen3_moe", "Q8_0"), ("qwen3", "IQ4_XS")]
)
def test_gguf_files(family: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_gguf(tmp_path, family, storage)
    check(resolve_model(str(tmp_path / "model.gguf")))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_embedding_and_head_of_packed_checkpoints(is_tied: bool, dtype: str, tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", Packing("awq"), tie_word_embeddings=is_tied)
    check(tmp_path / "packed", dtype=dtype)


@pytest.mark.parametrize("name", ["QWEN2_HALF_B", "LLAMA_8B"])
@pytest.mark.parametrize(
    "packing", [Packing("awq", group_size=128), Packing("compressed", bits=8, group_size=0)], ids=str
)
def test_a_published_model_takes_no_more_than_its_checkpoint(name: str, packing: Packing) -> None:
    """Models with a tied and with a separate head; the limit is 1.15 times the checkpoint."""
    spec, _ = read_model({**getattr(published, name), "quantization_config": quantization_config(packing)})
    shard = build_shard(spec, ParallelLayout(), 0)
    counted = weight_bytes(spec.with_packed_tables(rounds=True), shard, 2, "cpu")
    assert counted.held < 1.02 * counted.loaded
    assert counted.held < 0.98 * weight_bytes(spec, shard, 2, "cpu").held


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_embedding_and_head_while_loading(is_tied: bool, quantization: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", **(SIZES[""] | HEADS), tie_word_embeddings=is_tied)
    check(tmp_path, dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_of_gguf_files(is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = {"tokens.weight": "Q4_K", "lm_head.weight": "Q6_K"}
    make_gguf(tmp_path, "llama", "Q4_K", others=others, tie_word_embeddings=is_tied)
    check(resolve_model(str(tmp_path / "model.gguf")), dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "fp8-block"), ("qwen3_moe", "fp8-channel"), ("llama", "autofp8"), ("phi3", "nvfp4")],
)
def test_packed_floats(family: str, form: str, tmp_path: Path) -> None:
    packed_floats.make_packed(tmp_path, family, form)
    check(tmp_path / "packed")


def test_blocks_of_8_bit_floats_with_modules_left_out(tmp_path: Path) -> None:
    def choose(name: str) -> bool:
        return is_linear(name) and "layers.1." not in name

    packed_floats.make_packed(tmp_path, "deepseek_v3", "fp8-native", choose)
    edit_config(tmp_path / "packed", lambda config: config.update(modules_to_not_convert=["model.layers.1"]))
    check(tmp_path / "packed")


def test_mxfp4(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    check(tmp_path / "packed")


@pytest.fixture
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.setattr(load, "choose", lambda *args, **more: registry.with_triton(more["batch_invariant"]))


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize(
    "packing",
    [
        Packing("awq"),
        Packing("gptq", has_order=True, is_symmetric=True),
        Packing("compressed", bits=8, group_size=0, is_symmetric=True),
    ],
    ids=str,
)
def test_packed_checkpoints_on_a_gpu(packing: Packing, tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", packing)
    check(tmp_path / "packed", "cuda")


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize(("family", "form"), [("llama", "fp8-block"), ("phi3", "nvfp4")])
def test_packed_floats_on_a_gpu(family: str, form: str, tmp_path: Path) -> None:
    packed_floats.make_packed(tmp_path, family, form)
    check(tmp_path / "packed", "cuda")


@pytest.mark.usefixtures("kernels_of_a_gpu")
def test_mxfp4_on_a_gpu(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    check(tmp_path / "packed", "cuda")


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize("quantization", ["int4-g32", "int8", "fp8"])
def test_while_loading_on_a_gpu(quantization: str, tmp_path: Path) -> None:
    """fp8 without rounded activations."""
    make_checkpoint(tmp_path, "qwen3_moe", **(SIZES[""] | HEADS | SIZES["qwen3_moe"]))
    check(tmp_path, "cuda", quantization=quantization)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_4_bits_while_loading(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **(SIZES[""] | HEADS | SIZES.get(family, {})))
    check(tmp_path, quantization="int4-g32")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_4_bit_head(is_tied: bool, tmp_path: Path) -> None:
    sizes = SIZES[""] | HEADS | {"tie_word_embeddings": is_tied}
    make_checkpoint(tmp_path, "llama", dtype="bfloat16", **sizes)
    check(tmp_path, quantization="int4", dtype="bfloat16")


def test_8_bit_floats_while_loading(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", **(SIZES[""] | HEADS | SIZES["qwen3_moe"]))
    check(tmp_path, quantization="fp8")
