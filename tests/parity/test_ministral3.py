"""Ministral 3 with query temperatures that differ from the published ones, with and without YaRN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.parity import check_logprobs, random_prompts
from support.tiny import ROPE_SCALINGS, make_checkpoint

ORIGINAL = 16  # tokens; prompts are longer
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {**ROPE_SCALINGS["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5},
    "default": {"rope_type": "default"},
}


@pytest.mark.parametrize("kind", ROPES)
def test_other_temperatures(kind: str, tmp_path: Path) -> None:
    rope = ROPES[kind] | {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
    vocab_size = make_checkpoint(tmp_path, "ministral3", rope_parameters=rope | {"llama_4_scaling_beta": 0.2})
    prompts = random_prompts(vocab_size)
    assert max(map(len, prompts)) > 2 * ORIGINAL
    check_logprobs(tmp_path, tmp_path, prompts)
