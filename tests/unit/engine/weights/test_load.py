"""Loading a checkpoint's tensors: strict in both directions, names and shapes in errors, tied heads, dummy weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.build import WeightSlice
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import MLASpec, MoESpec
from serve_llm.engine.model.weight_map import WeightRule
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.dummy import build_dummy_loader
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.load import load_model, match_tensors
from serve_llm.engine.weights.parameters import CheckpointLoader, Source
from support.forward import CPU, Harness, load, load_whole
from support.matrix import FEW, mostly_slow
from support.quantised import quantise_checkpoint
from support.ranks import Ranks
from support.reference import reference_logprobs
from support.tiny import FAMILIES, HYBRIDS, make_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Tensors = dict[str, Tensor]
# all others: "model."
BASE_PREFIX = {
    **dict.fromkeys(("gpt2", "gptj", "falcon", "qwen", "bloom", "mpt"), "transformer."),
    "gpt_neox": "gpt_neox.",
}
EXTRAS = {  # all others: inverse frequencies
    "gpt2": "transformer.h.0.attn.masked_bias",
    "gptj": "transformer.h.0.attn.bias",
    "qwen": "transformer.h.0.attn.masked_bias",
    "gpt_neox": "gpt_neox.layers.0.attention.masked_bias",
    "opt": None,
    "bloom": None,
    "mpt": None,
}


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


def logprobs(directory: Path) -> Tensor:
    spec, decoder = load(directory)
    return Harness(spec, decoder, torch.float32).logprobs([PROMPT])[0]


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_each_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    num_layers = 2 if family in HYBRIDS else 1  # one of each kind
    make_checkpoint(tmp_path, family, **{"n_layer" if family in ("gpt2", "gptj") else "num_hidden_layers": num_layers})
    whole = load_file(tmp_path / "model.safetensors")
    for missing in whole:
        save_file({name: tensor for name, tensor in whole.items() if name != missing}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match="lacks") as caught:
            load(tmp_path)
        assert str(caught.value) == f"{tmp_path}: the checkpoint lacks {missing}"


@pytest.mark.parametrize("missing", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_every_rank_names_what_is_missing(missing: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != missing})
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    ranks = Ranks(spec, ParallelLayout(2, 2))
    for shard, neighbours in zip(ranks.shards, ranks.neighbours, strict=True):
        with pytest.raises(ModelError, match=f"lacks {missing}"):
            load_model(tmp_path, spec, weight_map, shard=shard, groups=neighbours, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_unused_tensors_are_named(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    rewrite(tmp_path, lambda tensors: {**tensors, "model.layers.3.extra.weight": torch.zeros(2), "a": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"uses a, model\.layers\.3\.extra\.weight$"):
        load(tmp_path)


def test_a_tensor_under_two_names_is_unused_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"] + 1})
    with pytest.raises(ModelError, match=r"uses (model\.)?norm\.weight$"):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_shapes_are_named(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    whole = load_file(tmp_path / "model.safetensors")
    dense = (
        "mlp.down_proj.weight",
        "mlp.c_fc.weight",
        "mlp.w1.weight",
        "fc1.weight",
        "fc_in.weight",
        "4h.weight",
        "ffn.up_proj.weight",
    )
    experts = ("experts.0.w1.weight", "experts.0.down_proj.weight", ".output_linear.weight", "experts.down_proj")
    name = next(name for name in whole if name.endswith((*dense, *experts)))
    save_file({**whole, name: whole[name][:-1].contiguous()}, tmp_path / "model.safetensors")
    right, wrong = list(whole[name].shape), [whole[name].shape[0] - 1, *whole[name].shape[1:]]
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert (
        str(caught.value) == f"{name} has shape {wrong}, but config.json asks for {right}: are they of the same model?"
    )


def test_integers_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: {n: t.to(torch.int8) if "q_proj" in n else t for n, t in tensors.items()})
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored as torch\.int8"):
        load(tmp_path)


def test_int8_weights_must_be_what_config_json_says(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float", "llama")
    directory = tmp_path / "int8"
    quantise_checkpoint(tmp_path / "float", directory)
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = load_file(directory / "model.safetensors")

    def refused(tensors: Tensors, message: str) -> None:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load(directory)

    scale = whole[f"{name}_scale"]
    refused({key: tensor for key, tensor in whole.items() if key != f"{name}_scale"}, f"lacks {name}_scale$")
    refused({**whole, name: whole[name].float()}, r"stored as torch\.float32, but config\.json says .* int8")
    refused({**whole, f"{name}_scale": scale[:-1]}, rf"{name}_scale has shape \[83, 1\], but .* \[84, 1\]")
    refused({**whole, f"{name}_scale": scale.to(torch.int8)}, f"{name}_scale is stored as torch.int8, but")
    refused({**whole, f"{name}_zero_point": scale.to(torch.int8)}, f"uses {name}_zero_point$")


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_names_without_prefix_and_useless_tensors(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    expected = logprobs(tmp_path)
    prefix = BASE_PREFIX.get(family, "model.")
    extra = EXTRAS.get(family, "model.layers.0.self_attn.rotary_emb.inv_freq")
    if extra is not None:
        rewrite(tmp_path, lambda tensors: {**tensors, extra: torch.zeros(3)})
        assert torch.equal(logprobs(tmp_path), expected)
    rewrite(tmp_path, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    assert any(
        name.startswith(("layers.", "h.", "decoder.", "blocks.")) for name in load_file(tmp_path / "model.safetensors")
    )
    assert torch.equal(logprobs(tmp_path), expected)


class TestTiedHead:
    EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        make_checkpoint(tmp_path, "qwen3")
        assert self.HEAD not in load_file(tmp_path / "model.safetensors")
        return tmp_path

    def test_stored_twice(self, directory: Path) -> None:
        expected = logprobs(directory)
        rewrite(directory, lambda tensors: {**tensors, self.HEAD: tensors[self.EMBEDDING].clone()})
        assert torch.equal(logprobs(directory), expected)

    def test_stored_as_the_head(self, directory: Path) -> None:
        expected = logprobs(directory)

        def renamed(tensors: Tensors) -> Tensors:
            tensors[self.HEAD] = tensors.pop(self.EMBEDDING)
            return tensors

        rewrite(directory, renamed)
        assert torch.equal(logprobs(directory), expected)

    def test_stored_with_other_values_is_not_tied(self, directory: Path) -> None:
        expected = logprobs(directory)
        rewrite(directory, lambda tensors: {**tensors, self.HEAD: tensors[self.EMBEDDING] * 0.7})
        ours = logprobs(directory)
        assert (ours - expected).abs().max() > 0.1
        assert (ours - reference_logprobs(directory, PROMPT)).abs().max() < 1e-4


class TestFiles:
    def test_none(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(
            ModelError, match=r"contains neither model\.safetensors nor model\.safetensors\.index\.json"
        ):
            load(tmp_path)

    def test_one_file_with_another_name(self, tmp_path: Path) -> None:
        """As AutoGPTQ names it. Copies in a publisher's own format and adapters do not count."""
        make_checkpoint(tmp_path, "llama")
        expected = logprobs(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
        for name in ("consolidated", "consolidated-00001-of-00002", "adapter_model"):
            save_file({"other": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        assert torch.equal(logprobs(tmp_path), expected)
        save_file({"other": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
        with pytest.raises(ModelError, match="nor only one other safetensors file"):
            load(tmp_path)

    def test_parts_without_an_index(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
        expected = logprobs(tmp_path)
        (tmp_path / "model.safetensors.index.json").unlink()
        assert torch.equal(logprobs(tmp_path), expected)
        next(tmp_path.glob("*-00002-of-*.safetensors")).unlink()
        with pytest.raises(ModelError, match="nor only one other safetensors file or all parts"):
            load(tmp_path)

    @pytest.mark.parametrize("count", ["00001", "99999999999"])
    def test_parts_that_cannot_be_one_model(self, count: str, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        whole = tmp_path / "model.safetensors"
        shutil.copy(whole, tmp_path / f"model-1-of-{count}.safetensors")
        whole.rename(tmp_path / f"model-00001-of-{count}.safetensors")
        with pytest.raises(ModelError, match="nor only one other safetensors file or all parts"):
            load(tmp_path)

    def test_parts_without_an_index_that_hold_the_same_tensor(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        whole = tmp_path / "model.safetensors"
        shutil.copy(whole, tmp_path / "model-1-of-2.safetensors")
        whole.rename(tmp_path / "model-2-of-2.safetensors")
        with pytest.raises(ModelError, match="several of its safetensors files hold the same tensor"):
            load(tmp_path)

    def test_cut_off(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
            load(tmp_path)

    def test_shard_missing_or_not_as_the_index_says(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
        index = tmp_path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"].pop("model.norm.weight")
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"do not name the same tensors: model\.norm\.weight"):
            load(tmp_path)
        next(tmp_path.glob("*-00002-of-*.safetensors")).unlink()
        with pytest.raises(ModelError, match=r"00002-of-.*cannot be read"):
            load(tmp_path)
        index.write_text("{}")
        with pytest.raises(ModelError, match="is not an index"):
            load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_parts_of_the_whole(family: str, tmp_path: Path) -> None:
    """However a checkpoint stores a parameter: transposed, fused with others, or plain."""
    make_checkpoint(tmp_path, family)
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = Checkpoint(tmp_path)
    sources = match_tensors(checkpoint, spec, weight_map, "here")[1]
    ways = (CheckpointLoader(checkpoint, sources, torch.float32, CPU), build_dummy_loader(3, torch.float32, CPU))
    mixer, ffn, width = spec.layers[1].attention, spec.layers[0].ffn, spec.hidden_size
    inner, where = (
        (ffn.expert.intermediate_size, "ffn.experts.3") if isinstance(ffn, MoESpec) else (ffn.intermediate_size, "ffn")
    )
    if isinstance(mixer, MLASpec):
        up = mixer.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        attention = {"kv_up": (up, mixer.kv_lora_rank), "output": (width, mixer.num_heads * mixer.v_head_dim)}
    else:
        attention = {
            "q": (mixer.num_heads * mixer.head_dim, width),
            "output": (width, mixer.num_heads * mixer.head_dim),
        }
    for name, shape in {
        "embedding.weight": (spec.vocab_size, width),
        **{f"layers.1.attention.{product}.weight": sizes for product, sizes in attention.items()},
        f"layers.0.{where}.up.weight": (inner, width),
        f"layers.0.{where}.down.weight": (width, inner),
        "layers.0.attention_norm.weight": (width,),
    }.items():
        for load_parameter in ways:
            whole = load_parameter(name, shape)
            assert tuple(whole.shape) == shape
            for dimension in range(len(shape)):
                for own in (range(0), range(5, 19), range(shape[dimension] - 1, shape[dimension])):
                    part = load_parameter(name, shape, WeightSlice(dimension, own))
                    assert torch.equal(part, whole.narrow(dimension, own.start, len(own)))


def test_parts_of_a_fused_tensor_do_not_touch_its_neighbours(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt2")
    fused = load_file(tmp_path / "model.safetensors")["transformer.h.1.attn.c_attn.weight"]  # (inputs, q k v)
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = Checkpoint(tmp_path)
    sources = match_tensors(checkpoint, spec, weight_map, "here")[1]
    found = CheckpointLoader(checkpoint, sources, torch.float32, CPU)(
        "layers.1.attention.k.weight", (57, 57), WeightSlice(0, range(19, 38))
    )
    assert torch.equal(found, fused.T[57 + 19 : 57 + 38])


def test_any_rows_of_groups_of_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "falcon")
    name = "transformer.h.1.self_attention.query_key_value.weight"
    fused = load_file(tmp_path / "model.safetensors")[name].view(3, 4, 10, 60)  # 2 queries, key and value of each group
    parts = {"q": fused[:, :2], "k": fused[:, 2], "v": fused[:, 3]}
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = Checkpoint(tmp_path)
    load_parameter = CheckpointLoader(
        checkpoint, match_tensors(checkpoint, spec, weight_map, "here")[1], torch.float32, CPU
    )
    for part, expected in parts.items():
        whole = expected.reshape(-1, 60)
        for start in range(len(whole)):
            for stop in range(start, len(whole) + 1):
                found = load_parameter(
                    f"layers.1.attention.{part}.weight", tuple(whole.shape), WeightSlice(0, range(start, stop))
                )
                assert torch.equal(found, whole[start:stop])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("grid", [ParallelLayout(), ParallelLayout(8), ParallelLayout(2, 3)])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, [*FEW, "qwen3_next"]))
def test_progress_counts_every_parameter(family: str, grid: ParallelLayout, load_format: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    ranks = Ranks(spec, grid)
    for shard, neighbours in zip(ranks.shards, ranks.neighbours, strict=True):
        seen: list[tuple[int, int]] = []
        load_model(
            tmp_path,
            spec,
            weight_map,
            shard=shard,
            groups=neighbours,
            dtype=torch.float32,
            device=CPU,
            load_format=load_format,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert seen == [(n + 1, len(seen)) for n in range(len(seen))]


def test_dummy_weights_depend_on_seed_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))

    def dummy(seed: int) -> Tensor:
        nowhere = tmp_path / "nowhere"
        decoder = load_whole(nowhere, spec, weight_map, load_format="dummy", seed=seed)
        return Harness(spec, decoder, torch.float32).logprobs([PROMPT])[0]

    first = dummy(1)
    assert first.isfinite().all()
    assert torch.equal(dummy(1), first)
    assert not torch.equal(dummy(2), first)


def test_logarithms_of_negative_numbers(tmp_path: Path) -> None:
    """GGUF files store the decay of linear attention so."""
    source = Source("a", WeightRule("a", ("layers.0.attention.decay",), "minus_exp"))
    for numbers, is_valid in ((torch.tensor([-1.0, -2.0, -0.5]), True), (torch.tensor([-1.0, 0.0, -0.5]), False)):
        save_file({"a": numbers}, tmp_path / "model.safetensors")
        read = CheckpointLoader(Checkpoint(tmp_path), {source.rule.parameters[0]: source}, torch.bfloat16, CPU)
        if is_valid:
            torch.testing.assert_close(read(source.rule.parameters[0], (3,)), numbers.neg().log())
        else:
            with pytest.raises(ModelError, match="a: all numbers must be below 0"):
                read(source.rule.parameters[0], (3,))
