"""Log-probabilities as requests see them: of the raw distribution, before temperature, bans and penalties."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serve_llm.engine.types import TokenLogprobs
from serve_llm.kernels.sampling import SamplingKernels


def token_logprobs(kernels: SamplingKernels, logits: Tensor, token_id: int, k: int) -> TokenLogprobs:
    """Of the token that was chosen, and of the k likeliest. logits: (vocab,), as the model gave them."""
    return prompt_logprobs(kernels, logits.unsqueeze(0), [token_id], k)[0]


def prompt_logprobs(kernels: SamplingKernels, logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Of the tokens that stand in the prompt. logits: (n, vocab); next_ids: for each position the id after it.
    Raises ValueError where logits are not finite."""
    return [TokenLogprobs(*row) for row in kernels.logprobs(logits, next_ids, k)]
