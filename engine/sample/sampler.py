"""From logits to the next token of each row: adjust, draw, and report log-probabilities.

Batch invariance: a row's result depends on its own logits, parameters and ids alone. Knows neither requests nor blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.engine.sample.logprobs import token_logprobs
from serve_llm.engine.sample.noise import uniform
from serve_llm.engine.sample.penalties import Ids, adjust, is_adjusted
from serve_llm.engine.types import Sampling, TokenLogprobs
from serve_llm.kernels.sampling import Draw, SamplingKernels

GREEDY_BELOW = 1e-5  # temperatures under it are greedy, as in vLLM; logits divided by them would overflow
GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)


class SampleRow(NamedTuple):
    """One sequence whose next token is wanted."""

    sampling: Sampling
    prompt_ids: Ids
    output_ids: Ids  # all so far, so that the new token's position is their number


class Sampled(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None  # if sampling.logprobs asks for them


@dataclass(frozen=True)
class Drawn:
    """What has been drawn, or will have been when the device comes to it."""

    finish: Callable[[], list[Sampled | None]]  # one of each row, in order; waits
    is_ready: Callable[[], bool] = lambda: True  # whether `finish` would not wait
    ids: Tensor | None = None  # (rows,) int64 on the device, -1 for None: where others begin before `finish`


def drawn(sampled: list[Sampled | None]) -> Drawn:
    """What has been drawn already."""
    return Drawn(lambda: sampled)


class Sampler:
    """One per worker."""

    def __init__(self, vocab_size: int, kernels: SamplingKernels) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
        """`sample`, which it does at once."""
        return drawn(self.sample(logits, rows))

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
        """The next token of each row; None where the model gave NaN or infinity, or left no allowed token possible.

        logits: (rows, vocab or more), of the head's dtype; columns past the vocabulary are padding of the head and
        never drawn. They are copied, to float32, only where a row's parameters change them.
        """
        logits = scores = logits[:, : self._vocab_size]
        adjusted = [place for place, row in enumerate(rows) if is_adjusted(row.sampling, len(row.output_ids))]
        if adjusted:
            scores = logits.to(torch.float32, copy=True)
            for place in adjusted:
                adjust(scores[place], *rows[place])
        found: list[Sampled | None] = []
        for place, token_id in enumerate(self.draw(scores, rows)):
            k = rows[place].sampling.logprobs
            wanted = k is not None and token_id >= 0
            logprobs = token_logprobs(self._kernels, logits[place], token_id, k or 0) if wanted else None
            found.append(None if token_id < 0 else Sampled(token_id, logprobs))
        return found

    def draw(self, scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One column of each row of adjusted logits (rows, columns); -1 where they are not finite."""
        return self._kernels.choose(scores, [draw_of(row) for row in rows])


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def is_plain(row: SampleRow) -> bool:
    """Whether the token is drawn from the logits as they are, and is all that is wanted."""
    return row.sampling.logprobs is None and not is_adjusted(row.sampling, len(row.output_ids))


def draw_of(row: SampleRow) -> Draw:
    """How a row's token is drawn, its noise included."""
    sampling = row.sampling
    if is_greedy(sampling):
        return GREEDY
    noise = uniform(sampling.seed, sampling.choice, len(row.output_ids))
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise)
