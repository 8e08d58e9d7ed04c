"""rank_pattern and alpha_pattern match the same modules as in PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft.utils.other import get_pattern_key

from serve_llm.engine.lora.module_patterns import ModulePatterns
from support.adapter_requests import OPTIONS, ask_all
from support.adapters import check_as_peft, make_adapter
from support.engine import generate, make_engine
from support.tiny import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT

LAYERS = [f"model.layers.{layer}" for layer in (0, 1, 10, 11)]
MODULES = [
    *(f"{layer}.self_attn.{name}" for layer in LAYERS for name in ("q_proj", "k_proj", "o_proj")),
    *(f"{layer}.mlp.{name}" for layer in LAYERS for name in ("gate_proj", "up_proj", "experts.down_proj")),
    "lm_head",
    "q_proj",
]


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj", "layers.1.self_attn.q_proj"],
        ["layers.1.self_attn.q_proj", "q_proj"],
        ["(q|k)_proj", "q_proj"],
        ["o_proj", "(q|k|o)_proj", ".*"],
        [r"layers\.[01]\.self_attn\.q_proj"],
        [r"model\.layers\.1\.mlp\.(gate|up)_proj", "up_proj"],
        [r".*\.q_proj"],
        [r".*\.experts.down_proj", "mlp.experts.down_proj"],
        ["^q_proj", "^model.layers.0.self_attn.k_proj", "^lm_head"],
        [r"layers\.(?:1[01]|0)\..*", "layers.1"],
        ["q_proj|k_proj", "proj"],
        [r"(self_attn)\.(\w)_proj", r"(up|gate)_proj$"],
        ["o_proj$", "self_attn"],
        ["", "head", "m_head", r"\w+head"],
    ],
)
def test_as_peft_matches(patterns: list[str]) -> None:
    found = ModulePatterns("rank_pattern", {pattern: pattern for pattern in patterns})
    assert [found.find(module, module) for module in MODULES] == [
        get_pattern_key(patterns, module) for module in MODULES
    ]


def test_as_peft_computes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "llama", head_dim=16)
    patterns = {
        "rank_pattern": {r"layers\.[0]\.self_attn\.(q|k)_proj": 7, "(v|o)_proj": 2, "down_proj": 5},
        "alpha_pattern": {r".*\.up_proj": 3, "^model.layers.1.mlp.down_proj": 11, r"(gate|down)_proj": 20},
    }
    adapter = make_adapter(tmp_path / "base", tmp_path / "adapter", **patterns)
    requests = ask_all([None, adapter])
    check_as_peft(tmp_path / "base", requests, generate(make_engine(tmp_path / "base", **OPTIONS), requests))
