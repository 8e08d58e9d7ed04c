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


class BrokenLogits(ValueError):
    """The model gave NaN or infinity, or made every allowed token impossible. `rows`: where; other rows are sound."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(f"the model's logits are not finite (rows {', '.join(map(str, rows))} of the batch)")


class Sampler:
    """One per worker."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._choose = choose if device.type == "cpu" else reference.choose

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """The next token of each row. logits: (rows, vocab or more) float32, changed in place; columns past the
        vocabulary are padding of the head and never drawn. Raises BrokenLogits."""
        logits = logits[:, : self._vocab_size]
        raw = [logits[i].clone() if row.sampling.logprobs is not None else None for i, row in enumerate(rows)]
        for scores, row in zip(logits, rows, strict=True):
            adjust(scores, row.sampling, row.prompt_ids, row.output_ids)
        chosen = self._choose(logits, [_draw_of(row) for row in rows])
        if broken := [i for i, token_id in enumerate(chosen) if token_id < 0]:
            raise BrokenLogits(broken)
        return [
            Sampled(token_id, None if scores is None else token_logprobs(scores, token_id, row.sampling.logprobs or 0))
            for token_id, scores, row in zip(chosen, raw, rows, strict=True)
        ]


def _draw_of(row: SampleRow) -> Draw:
    sampling = row.sampling
    if sampling.temperature < GREEDY_BELOW:
        return Draw(0.0, 0, 1.0, 0.0, 0.0)
    noise = uniform(sampling.seed, sampling.choice, len(row.output_ids))
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise)
