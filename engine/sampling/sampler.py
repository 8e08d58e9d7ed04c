"""From logits to the next token of each row: adjust the logits, sample, and report log-probabilities.

Batch invariance: the result of a row depends on its own logits, parameters and ids alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from serve_llm.common.types import GREEDY_BELOW, Sampling, TokenLogprobs
from serve_llm.engine.sampling.logit_adjustments import SampleRow, adjust, is_adjusted
from serve_llm.engine.sampling.noise import uniform
from serve_llm.kernels.sampling import Draw, SamplingKernels

GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None  # None unless sampling.logprobs asks for them


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens, which may still be in transit from the device."""

    finish: Callable[[], list[SampledToken | None]]  # blocks; one per row, in order
    is_ready: Callable[[], bool] = lambda: True  # whether `finish` would return immediately
    token_ids: Tensor | None = None  # (rows,) int64 on the device, -1 for None; only if steps overlap


class Sampler:
    """Samples from whole rows of logits, synchronously."""

    def __init__(self, vocab_size: int, kernels: SamplingKernels) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """Like `sample`. The tokens are ready on return."""
        tokens = self.sample(logits, rows)
        return SamplerOutput(lambda: tokens)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
        """Sample the next token of each row; None if the logits are not finite or no token is allowed.

        logits: (rows, vocab or more), of the head's dtype; columns past the vocabulary are padding and never sampled.
        If parameters of a row change its logits, this works on a float32 copy. Masks are applied in place unless the
        log-probabilities of such a row are requested.
        """
        logits = logits[:, : self._vocab_size]
        scores = logits
        adjusted = [index for index, row in enumerate(rows) if is_adjusted(row)]
        masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
        if adjusted:
            scores = logits.to(torch.float32, copy=True)
        elif any(rows[index].sampling.logprobs is not None for index in masks):
            scores = logits.clone()
        for index in adjusted:
            adjust(scores[index], rows[index])
        if masks:
            self._kernels.apply_masks(scores, list(masks), torch.from_numpy(np.stack(list(masks.values()))))
        tokens: list[SampledToken | None] = []
        for index, token_id in enumerate(self.sample_ids(scores, rows)):
            k = rows[index].sampling.logprobs
            if token_id < 0:
                tokens.append(None)
            elif k is None:
                tokens.append(SampledToken(token_id, None))
            else:
                requested_ids = rows[index].sampling.logprob_token_ids
                (logprobs,) = find_logprobs(self._kernels, logits[index : index + 1], [token_id], k, requested_ids)
                tokens.append(SampledToken(token_id, logprobs))
        return tokens

    def sample_ids(self, scores: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One column per row of adjusted logits (rows, columns); -1 where they are not finite."""
        return self._kernels.sample(scores, build_draws(rows))


def find_logprobs(
    kernels: SamplingKernels, logits: Tensor, ids: Sequence[int], k: int, requested_ids: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Return, per row, the log-probability of its id, of the k most likely ids and of the requested ids, before
    temperature, bans and penalties.

    logits: (n, vocab), unchanged from the model. Raises ValueError if they are not finite.
    """
    if not requested_ids:
        return [TokenLogprobs(*row) for row in kernels.logprobs(logits, ids, k)]
    rows = kernels.logprobs(logits, ids, max(k, 1))
    most_likely = torch.tensor([row.top_ids[:1] for row in rows], device=logits.device)
    distances = logits[:, list(requested_ids)].double() - logits.gather(1, most_likely).double()
    return [
        add_requested_ids(
            TokenLogprobs(*row), k, requested_ids, [row.top_logprobs[0] + distance for distance in distant]
        )
        for row, distant in zip(rows, distances.tolist(), strict=True)
    ]


def add_requested_ids(
    found: TokenLogprobs, k: int, requested_ids: Sequence[int], requested_logprobs: Sequence[float]
) -> TokenLogprobs:
    """`found` with its k most likely ids, and the requested ids that are not among them."""
    logprobs = dict(zip(found.top_ids[:k], found.top_logprobs[:k], strict=True))
    for token_id, logprob in zip(requested_ids, requested_logprobs, strict=True):
        logprobs.setdefault(token_id, logprob)
    return TokenLogprobs(found.logprob, found.rank, list(logprobs), list(logprobs.values()))


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def is_unadjusted(row: SampleRow) -> bool:
    """Whether the token is sampled from the unchanged logits and no log-probabilities are requested."""
    return row.sampling.logprobs is None and row.mask is None and not is_adjusted(row)


def build_draws(rows: Sequence[SampleRow]) -> list[Draw]:
    """Build the rows' sampling parameters, with the random numbers for their next tokens."""
    draws = [GREEDY] * len(rows)
    sampled = [index for index, row in enumerate(rows) if not is_greedy(row.sampling)]
    if not sampled:
        return draws
    noise = uniform(
        [rows[index].sampling.seed for index in sampled],
        [rows[index].sampling.choice for index in sampled],
        [len(rows[index].output_ids) for index in sampled],
    )
    for index, number in zip(sampled, noise.tolist(), strict=True):
        sampling = rows[index].sampling
        draws[index] = Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, number)
    return draws
