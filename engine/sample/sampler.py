"""From logits to the next token of each row: adjust, draw, and report log-probabilities.

Batch invariance: a row's result depends on its own logits, parameters and ids alone. Knows neither requests nor blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.sample.logprobs import token_logprobs
from serve_llm.engine.sample.noise import uniform
from serve_llm.engine.sample.penalties import Ids, adjust
from serve_llm.engine.types import Sampling, TokenLogprobs
from serve_llm.kernels.reference import sampling as reference
from serve_llm.kernels.sampling import Draw, choose

GREEDY_BELOW = 1e-5  # temperatures under it are greedy, as in vLLM; logits divided by them would overflow


@dataclass(frozen=True)
class SampleRow:
    """One sequence whose next token is wanted."""

    sampling: Sampling
    prompt_ids: Ids
    output_ids: Ids  # all so far, so that the new token's position is their number


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None  # if sampling.logprobs asks for them


class Sampler:
    """One per worker."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._choose = choose if device.type == "cpu" else reference.choose

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
        """The next token of each row; None where the model gave NaN or infinity, or left no allowed token possible.

        logits: (rows, vocab or more) float32, changed in place; columns past the vocabulary are padding of the head and
        never drawn.
        """
        logits = logits[:, : self._vocab_size]
        raw = [logits[i].clone() if row.sampling.logprobs is not None else None for i, row in enumerate(rows)]
        for scores, row in zip(logits, rows, strict=True):
            adjust(scores, row.sampling, row.prompt_ids, row.output_ids)
        chosen = self.draw(logits, rows)
        return [
            None if token_id < 0 else Sampled(token_id, _logprobs(scores, token_id, row.sampling))
            for token_id, scores, row in zip(chosen, raw, rows, strict=True)
        ]

    def draw(self, scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One column of each row of adjusted logits (rows, columns) float32; -1 where they are not finite."""
        return self._choose(scores, [_draw_of(row) for row in rows])


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _logprobs(scores: Tensor | None, token_id: int, sampling: Sampling) -> TokenLogprobs | None:
    return None if scores is None else token_logprobs(scores, token_id, sampling.logprobs or 0)


def _draw_of(row: SampleRow) -> Draw:
    sampling = row.sampling
    if is_greedy(sampling):
        return Draw(0.0, 0, 1.0, 0.0, 0.0)
    noise = uniform(sampling.seed, sampling.choice, len(row.output_ids))
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise)
