"""Int8 checkpoints with layers whose activations cannot be rounded: weights keep their integers, and activations stay
as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.matrix import mostly_slow
from support.parity import check_greedy, check_logprobs, random_prompts
from support.quantised import edit_config, quantise_checkpoint
from support.tiny import make_checkpoint

GATE = r"re:.*mlp\.gate$"
STACKS = [f"model.layers.{layer}.block_sparse_moe.{name}_linear" for layer in range(3) for name in ("input", "output")]
CASES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    # family, sizes, modules to ignore, additional modules to quantise
    "keys alone in floating point": ("qwen2", {}, ["lm_head", r"re:.*k_proj$"], []),
    "gates alone in floating point": ("llama", {}, ["lm_head", r"re:.*gate_proj$"], []),
    "an LM head": ("llama", {"tie_word_embeddings": False}, [], ["lm_head"]),
    "an LM head that only config.json says to be int8": ("llama", {"tie_word_embeddings": False}, [], []),
    "up-projections of latent vectors": ("deepseek_v3", {}, ["lm_head", GATE], []),
    "routers": ("qwen3_moe", {}, ["lm_head"], [f"model.layers.{layer}.mlp.gate" for layer in (0, 2)]),
    "gates of linear attention": (
        "qwen3_next",
        {},
        ["lm_head", GATE],
        [f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in (0, 2)],
    ),
    "stacks in floating point": ("granitemoe", {}, ["lm_head", r"re:.*router"], []),
    "stacks": ("granitemoe", {}, ["lm_head", r"re:.*router"], STACKS),
}


@pytest.mark.parametrize("case", CASES)
def test_logprobs(case: str, tmp_path: Path) -> None:
    family, sizes, ignore, more = CASES[case]
    prompts = random_prompts(make_checkpoint(tmp_path / "float", family, **sizes))
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=ignore, heads=more)
    spec = check_logprobs(tmp_path / "int8", plain, prompts)
    assert spec.int8 is None


def test_modules_that_are_not_linear_in_torch(tmp_path: Path) -> None:
    """GPT-2's modules stay in floating point, although no entry of "ignore" names them."""
    prompts = random_prompts(make_checkpoint(tmp_path / "float", "gpt2"))
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=["re:.*"])
    edit_config(tmp_path / "int8", lambda config: config.update(ignore=["lm_head"]))
    check_logprobs(tmp_path / "int8", plain, prompts)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_in_a_group_of_its_own(is_tied: bool, tmp_path: Path) -> None:
    """The linear modules stay in floating point, although their group names another format."""
    prompts = random_prompts(make_checkpoint(tmp_path / "float", "qwen2", tie_word_embeddings=is_tied))
    ignore = ["lm_head", "re:.*layers.*"]
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=ignore, heads=["model.embed_tokens"])

    def split(config: dict[str, Any]) -> None:
        group = config["config_groups"]["group_0"]
        config["config_groups"]["group_1"] = {"targets": ["Embedding"], "weights": group["weights"]}
        group |= {"format": "float-quantized", "weights": group["weights"] | {"type": "float"}}

    edit_config(tmp_path / "int8", split)
    check_logprobs(tmp_path / "int8", plain, prompts)
    check_greedy(tmp_path / "int8", plain, prompts, ({"tensor": 3},))


def test_an_embedding_as_linear_modules(tmp_path: Path) -> None:
    prompts = random_prompts(make_checkpoint(tmp_path / "float", "llama"))
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", heads=["model.embed_tokens"])
    targets = ["Linear", "Embedding"]
    edit_config(tmp_path / "int8", lambda config: config["config_groups"]["group_0"].update(targets=targets))
    check_logprobs(tmp_path / "int8", plain, prompts)


RANKED = ("keys alone in floating point", "an LM head", "up-projections of latent vectors", "stacks")


@pytest.mark.parametrize("case", mostly_slow(RANKED, RANKED[::3]))
def test_several_ranks(case: str, tmp_path: Path) -> None:
    family, sizes, ignore, more = CASES[case]
    prompts = random_prompts(make_checkpoint(tmp_path / "float", family, **sizes))
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=ignore, heads=more)
    check_greedy(tmp_path / "int8", plain, prompts, ({"tensor": 2}, {"tensor": 3}, {"pipeline": 2}))
