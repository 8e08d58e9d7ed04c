"""Angles equal those of transformers for every kind of scaling, and are a pure function of the position."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.rope import build_angles, inverse_frequencies
from serve_llm.engine.model.rope_spec import DynamicScaling, RopeSpec
from serve_llm.kernels.rope import compute_angles
from support.tiny import ROPE_SCALINGS

CPU = torch.device("cpu")
HEAD_DIMS = (2, 14, 64, 128)
YARN_EXTRAS = [
    {},
    {"truncate": False},
    {"beta_fast": 20.0, "beta_slow": 2.0},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"attention_factor": 1.3},
    {"original_max_position_embeddings": 3},  # both ends of the ramp coincide
]
CASES = [
    *[ROPE_SCALINGS[kind] for kind in ("linear", "llama3", "yarn")],
    *[{**ROPE_SCALINGS["yarn"], **extra} for extra in YARN_EXTRAS[1:]],
]


def both(parameters: dict[str, object], head_dim: int, max_position: int = 256) -> tuple[RopeSpec, LlamaConfig]:
    written = {"rope_theta": 10000.0, **parameters}
    rope, _ = read_rope(ConfigReader({"rope_parameters": written}), max_position, head_dim)
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_position, rope_parameters=dict(written))
    return rope, config


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("parameters", CASES)
def test_equals_transformers(parameters: dict[str, object], head_dim: int) -> None:
    rope, config = both(parameters, head_dim)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), frequencies, rtol=1e-6, atol=0)
    positions = torch.arange(500)
    cos, sin = build_angles(rope, head_dim, CPU, compute_angles)(positions)
    angle = positions[:, None] * frequencies
    torch.testing.assert_close(cos, angle.cos() * magnitude, atol=2e-4, rtol=0)
    torch.testing.assert_close(sin, angle.sin() * magnitude, atol=2e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [14, 64])
def test_dynamic_equals_transformers_at_each_length(head_dim: int) -> None:
    rope, config = both(ROPE_SCALINGS["dynamic"], head_dim)
    assert isinstance(rope.scaling, DynamicScaling)
    positions = torch.tensor([0, 1, 100, 255, 256, 257, 400, 511])
    cos, sin = build_angles(rope, head_dim, CPU, compute_angles)(positions)
    for row, position in enumerate(positions.tolist()):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=position + 1)
        torch.testing.assert_close(cos[row], (position * frequencies).cos(), atol=2e-4, rtol=0)
        torch.testing.assert_close(sin[row], (position * frequencies).sin(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("parameters", [{"rope_type": "default"}, *ROPE_SCALINGS.values()])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_position_has_one_angle_in_every_batch(parameters: dict[str, object], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at = build_angles(both(parameters, 14)[0], 14, CPU, compute_angles)
        positions = torch.randperm(512)
        cos, sin = at(positions)
        for count in (1, 2, 3, 5, 17, 100, 511):
            some_cos, some_sin = at(positions[-count:])
            assert torch.equal(some_cos, cos[-count:]) and torch.equal(some_sin, sin[-count:])
    finally:
        torch.set_num_threads(before)
