"""Packed LM heads and embeddings of checkpoints have the values that they represent, on any ranks; those quantised
while loading are the same on any stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from serve_llm.common.hub import resolve_model
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from support.engine import generate, greedy, make_engine
from support.forward import load
from support.gguf_files import make_gguf
from support.matrix import mostly_slow
from support.packed import HEADS, SIZES, Packing, make_packed
from support.parity import check_logprobs
from support.quantised import is_linear
from support.tiny import make_checkpoint

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(40, 90))]
GRIDS = ({}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2})


def check(served: Path, plain: Path) -> None:
    """Compare logprobs with transformers, and the greedy tokens of several ranks with those of `plain`."""
    check_logprobs(served, plain, PROMPTS)
    wanted = [greedy(number, prompt, 6) for number, prompt in enumerate(PROMPTS)]
    expected = generate(make_engine(plain, dtype="float32"), wanted)
    for grid in GRIDS:
        results = generate(make_engine(served, dtype="float32", **grid), wanted)
        for number, result in expected.items():
            assert results[number].token_ids == result.token_ids


@pytest.mark.parametrize("storage", mostly_slow(["Q8_0", "Q6_K", "Q4_K", "Q5_0", "IQ4_NL"], ["Q6_K"]))
def test_tied_tables_of_gguf_files(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_gguf(tmp_path, "qwen2", "Q8_0", others={"tokens.weight": storage}, tie_word_embeddings=True)
    directory = resolve_model(str(tmp_path / "model.gguf"))
    spec, _ = load(directory)
    assert spec.tie_word_embeddings and spec.head_form is not None and spec.head_form == spec.embedding_form
    check(directory, tmp_path / "plain")


def test_a_head_of_gptq(tmp_path: Path) -> None:
    """`lm_head` in the config says that the head is packed."""
    ends = ("proj.weight", "head.weight")
    make_packed(tmp_path, "llama", Packing("gptq", has_order=True), choose=lambda name: name.endswith(ends))
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["lm_head"] = True
    path.write_text(json.dumps(config))
    assert load(tmp_path / "packed")[0].head_form == GroupQuantForm(4, 16, has_zeros=True, has_order=True)
    check(tmp_path / "packed", tmp_path / "plain")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(kept | {"lm_head.weight": plain["lm_head.weight"]}, tmp_path / "packed" / "model.safetensors")
    check(tmp_path / "packed", tmp_path / "plain")  # the config promises more than the file holds


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("packing", ["awq", "int8"])
def test_tables_in_int8_on_several_stages(packing: str, is_tied: bool, tmp_path: Path) -> None:
    """In bfloat16. The first of two stages has its own table."""
    directory, options = tmp_path / "packed", {}
    if packing == "awq":
        make_packed(tmp_path, "llama", Packing("awq"), choose=is_linear, tie_word_embeddings=is_tied)
    else:
        directory, options = tmp_path / "plain", {"quantization": "int8"}
        make_checkpoint(directory, "llama", **(SIZES[""] | HEADS), tie_word_embeddings=is_tied)
    wanted = [greedy(number, prompt, 6) for number, prompt in enumerate(PROMPTS)]
    whole, parts = (
        generate(make_engine(directory, dtype="bfloat16", pipeline=stages, **options), wanted) for stages in (1, 2)
    )
    assert [parts[n].token_ids for n in parts] == [whole[n].token_ids for n in whole]
