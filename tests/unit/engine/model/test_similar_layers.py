"""Checks that depend on shapes alone need only one layer of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.engine.model.layer import Hidden
from support.forward import Harness, load
from support.tiny import make_checkpoint


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("llama", {"num_hidden_layers": 5}, [0, 4]),
        (
            "gemma3_text",
            {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [0, 1, 5],
        ),
        ("deepseek_v3", {"num_hidden_layers": 5, "first_k_dense_replace": 2}, [0, 2, 4]),
    ],
)
def test_the_first_layer_of_each_kind_and_the_last_one_run(
    family: str, options: dict[str, object], expected: list[int], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **options)
    spec, decoder = load(tmp_path)
    prompts = [[1, 2, 3]]
    before = Harness(spec, decoder, torch.float32).logprobs(prompts)
    ran: list[int] = []
    for index, layer in enumerate(decoder._layers):
        forward = layer.forward

        def watched(*arguments: Tensor, _index: int = index, _forward=forward) -> Hidden:  # type: ignore[no-untyped-def]
            ran.append(_index)
            found: Hidden = _forward(*arguments)
            return found

        layer.forward = watched  # type: ignore[method-assign, assignment]
    with decoder.skip_similar_layers():
        Harness(spec, decoder, torch.float32).logprobs(prompts)
    assert ran == expected
    ran.clear()
    assert torch.equal(Harness(spec, decoder, torch.float32).logprobs(prompts)[0], before[0])
    assert ran == list(range(len(decoder._layers)))


def test_layers_that_others_read_run_as_well(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=6)
    spec, decoder = load(tmp_path)
    decoder.collect([2, 4], range(6))
    with decoder.skip_similar_layers():
        Harness(spec, decoder, torch.float32).logprobs([[1, 2, 3]])
        assert len(decoder.collected) == 2
