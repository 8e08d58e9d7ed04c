"""Filters against transformers' own logits processors: the same tokens with the same probabilities."""

import pytest
import torch
from transformers.generation import logits_process as theirs

from serve_llm.kernels import torch_sampling as sampling
from serve_llm.kernels.sampling import Draw
from serve_llm.kernels.torch_sampling import SyncSamplingKernels

NONE = torch.empty(1, 0, dtype=torch.long)


@pytest.mark.parametrize(
    ("draw", "processors"),
    [
        (Draw(0.7, 0, 1.0, 0.0, 0.0), [theirs.TemperatureLogitsWarper(0.7)]),
        (Draw(1.0, 7, 1.0, 0.0, 0.0), [theirs.TopKLogitsWarper(7)]),
        (Draw(1.0, 0, 0.8, 0.0, 0.0), [theirs.TopPLogitsWarper(0.8)]),
        (Draw(1.0, 0, 1.0, 0.1, 0.0), [theirs.MinPLogitsWarper(0.1)]),
        (
            Draw(1.4, 30, 0.9, 0.02, 0.0),
            [
                theirs.TemperatureLogitsWarper(1.4),
                theirs.MinPLogitsWarper(0.02),
                theirs.TopKLogitsWarper(30),
                theirs.TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_same_distribution(draw: Draw, processors: list[theirs.LogitsProcessor], seed: int) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * 2
    scores = logits
    for process in processors:
        scores = process(NONE, scores)
    borders = scores[0].double().softmax(0).cumsum(0)
    noise = [(i + 0.5) / 500 for i in range(500)]
    sure = [u for u in noise if (borders - u).abs().min() > 1e-5]
    assert len(sure) > 480
    wanted = torch.searchsorted(borders, torch.tensor(sure, dtype=torch.float64), right=True).tolist()
    assert (
        SyncSamplingKernels(sampling).sample(logits.expand(len(sure), -1), [draw._replace(noise=u) for u in sure])
        == wanted
    )
