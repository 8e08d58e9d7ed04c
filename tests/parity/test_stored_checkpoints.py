"""Tiny checkpoints that GPTQModel and AutoAWQ packed, stored as files because both need other versions of torch or
transformers.

A file holds the tensors, config.json as its metadata, and the log-probabilities that transformers computes in float32
from the weights that the packer's own code dequantises.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.engine import generate, greedy, make_engine
from support.forward import Harness, load

FILES = sorted((Path(__file__).parent / "packed").glob("*.safetensors"))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def unfold(path: Path, directory: Path) -> Tensor:
    """Write the checkpoint to the directory. Returns the logprobs: (tokens of the prompt, vocabulary)."""
    with safe_open(path, framework="pt") as file:
        (directory / "config.json").write_text(file.metadata()["config"])
    tensors = load_file(path)
    expected = tensors.pop("expected")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_log_probabilities(path: Path, tmp_path: Path) -> None:
    expected = unfold(path, tmp_path)
    spec, decoder = load(tmp_path)
    assert spec.grouped is not None
    (found,) = Harness(spec, decoder, torch.float32).logprobs([PROMPT])
    assert (found - expected).abs().max() < 1e-4
    (output,) = generate(make_engine(tmp_path, dtype="float32", tensor=2), [greedy(0, PROMPT, 1)]).values()
    assert output.token_ids == [int(expected[-1].argmax())]


def test_each_layout_is_there() -> None:
    stored = []
    for path in FILES:
        with safe_open(path, framework="pt") as file:
            stored.append(json.loads(file.metadata()["config"])["quantization_config"])
    assert {(one["quant_method"], one["bits"]) for one in stored} == {("gptq", 4), ("gptq", 8), ("awq", 4)}
    assert {one.get("desc_act", False) for one in stored} == {False, True}
