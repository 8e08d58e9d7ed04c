"""What a request's parameters do to its logits before the draw: bias, bans and penalties.

One row at a time; a row whose request asks for none of it is not touched. Formulas and order as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_llm.engine.types import Sampling

Ids = Sequence[int] | npt.NDArray[np.int64]


def adjust(scores: Tensor, sampling: Sampling, prompt_ids: Ids, output_ids: Ids) -> None:
    """Change one row of logits in place. scores: (vocab,) float32.

    In this order: logit_bias is added; what is not allowed or is banned becomes -inf; repetition_penalty divides the
    positive and multiplies the negative logits of ids in prompt or output (CTRL, arXiv:1909.05858); frequency_penalty
    times the number of occurrences, and presence_penalty, are subtracted for ids in the output.
    """
    if sampling.logit_bias:
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        scores[_index(sampling.logit_bias, scores)] += bias
    _mask(scores, sampling, prompt_ids, output_ids)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64))))
        index = torch.from_numpy(seen).to(scores.device)
        found, penalty = scores[index], sampling.repetition_penalty
        scores[index] = torch.where(found > 0, found / penalty, found * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(output_ids):
        seen, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        scores[torch.from_numpy(seen).to(scores.device)] -= torch.from_numpy(penalties).to(scores)


def is_adjusted(sampling: Sampling, num_output: int) -> bool:
    """Whether `adjust` may change the logits of the token after `num_output` others."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words_ids
        or num_output < sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def _mask(scores: Tensor, sampling: Sampling, prompt_ids: Ids, output_ids: Ids) -> None:
    allowed, banned = masked(sampling, prompt_ids, output_ids, len(scores))
    if allowed:
        index = _index(allowed, scores)
        kept = scores[index]
        scores.fill_(-torch.inf)
        scores[index] = kept
    elif banned:
        scores[_index(banned, scores)] = -torch.inf


def masked(sampling: Sampling, prompt_ids: Ids, output_ids: Ids, vocab_size: int) -> tuple[set[int], set[int]]:
    """What allowed_token_ids, bad_words_ids and min_tokens come to: the ids that alone are possible, if there are any,
    else those that are not. Where they leave nothing, the bans give way: an allowed id that ends the request early or
    completes a bad word is better than none."""
    banned = _bad_word_ends(sampling.bad_words_ids, prompt_ids, output_ids) if sampling.bad_words_ids else set()
    if len(output_ids) < sampling.min_tokens:
        # a checkpoint may name end ids that it has no embedding for
        banned.update(token_id for token_id in sampling.stop_token_ids if token_id < vocab_size)
    if sampling.allowed_token_ids:
        allowed = set(sampling.allowed_token_ids)
        return (allowed - banned) or allowed, set()
    return set(), banned if len(banned) < vocab_size else set()


def _bad_word_ends(bad_words: Iterable[tuple[int, ...]], prompt_ids: Ids, output_ids: Ids) -> set[int]:
    """The last ids of the bad words whose other ids are the latest ones; a word may begin in the prompt. In every step
    all words are looked at, so most are let go after one comparison."""
    ends = set()
    latest = next((int(ids[-1]) for ids in (output_ids, prompt_ids) if len(ids)), None)
    for word in bad_words:
        if len(word) == 1 or (word[-2] == latest and _ends_with(prompt_ids, output_ids, word[:-1])):
            ends.add(word[-1])
    return ends


def _ends_with(prompt_ids: Ids, output_ids: Ids, ids: tuple[int, ...]) -> bool:
    split = max(0, len(ids) - len(output_ids))
    if split > len(prompt_ids):
        return False
    return (*prompt_ids[len(prompt_ids) - split :], *output_ids[len(output_ids) - len(ids) + split :]) == ids


def _index(ids: Iterable[int], scores: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=scores.device)
