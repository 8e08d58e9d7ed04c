"""Log-probabilities of ids that were not sampled: of a prompt, or forced ones. Computed a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from serve_llm.common.types import TokenLogprobs
from serve_llm.engine.sampling.sampler import find_logprobs
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits

MAX_POSITIONS = 64  # positions whose logits are held at a time: 64 x 152k x 4 bytes = 39 MB


def find_known_logprobs(
    compute_logits: Callable[[Tensor], Tensor],
    vocabulary: VocabParallelLogits,
    hidden: Tensor,
    next_ids: Sequence[int],
    k: int,
    requested_ids: Sequence[int],
    is_output_rank: bool,
) -> list[TokenLogprobs] | None:
    """The log-probability of the id after each position, of the k most likely ids and of the requested ids.
    None if logits are not finite.

    hidden: (positions or more, hidden_size). Every rank of the tensor-parallel group calls this; those other than the
    output rank get an empty list.
    """
    logprobs: list[TokenLogprobs] = []
    is_finite = True
    for start in range(0, len(next_ids), MAX_POSITIONS):
        ids = next_ids[start : start + MAX_POSITIONS]
        logits = vocabulary.gather(compute_logits(hidden[start : start + len(ids)]))
        if is_output_rank:
            try:
                logprobs += find_logprobs(vocabulary.kernels, logits, ids, k, requested_ids)
            except ValueError:
                is_finite = False
    return logprobs if is_finite else None
