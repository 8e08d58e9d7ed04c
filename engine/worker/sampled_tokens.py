"""Finds the tokens of a step after which ids are sampled, masks their rows, and adds the sampled ids to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serve_llm.engine.sampling.grammar_mask import NOTHING_LEFT, Mask, intersect
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.sampler import SampledToken
from serve_llm.engine.scheduler.output import RunnerOutput, ScheduledTokens

NOT_FINITE = "the model's logits are not finite"


def find_sampled_rows(scheduled: Sequence[ScheduledTokens], ends: Sequence[int]) -> list[int]:
    """Find the rows after which an id is sampled. ends: where the rows of each chunk end."""
    return [row for chunk, end in zip(scheduled, ends, strict=True) for row in range(end - chunk.num_samples, end)]


def apply_masks(rows: list[SampleRow], masks: Mapping[int, Mask]) -> dict[int, str]:
    """Put the grammar masks into the rows, by index. Returns the errors of rows in which nothing is left to sample."""
    errors: dict[int, str] = {}
    for index, grammar_mask in masks.items():
        mask, error = intersect(grammar_mask, rows[index])
        if error:
            errors[index] = error
        else:
            rows[index] = msgspec.structs.replace(rows[index], mask=mask)
    return errors


def add_sampled_tokens(
    results: Sequence[RunnerOutput],
    scheduled: Sequence[ScheduledTokens],
    tokens: Sequence[SampledToken | None],
    errors: Mapping[int, str],
) -> None:
    """Add the tokens of a step to its results, which have the order of `scheduled`.

    tokens: one per sampled row; None where the logits are not finite. errors: why nothing may be sampled in a row."""
    allowed = list(tokens)
    for row in errors:
        allowed[row] = None
    row = 0
    for chunk, result in zip(scheduled, results, strict=True):
        if not chunk.sample:
            continue
        next_row = row + 1 + len(chunk.draft_ids)
        if result.error is None:
            error = errors.get(row, NOT_FINITE)
            _add_accepted_tokens(result, allowed[row], chunk.draft_ids, allowed[row + 1 : next_row], error)
            result.is_contradiction = result.error == NOTHING_LEFT
        row = next_row


def _add_accepted_tokens(
    result: RunnerOutput,
    token: SampledToken | None,
    draft_ids: Sequence[int],
    next_tokens: Sequence[SampledToken | None],
    error: str,
) -> None:
    """Add the tokens with which the request continues: the first one, and each one after a draft that was accepted.

    token: sampled after the newest known token. next_tokens: sampled after each draft. None if sampling failed. error:
    why the first one failed, if it did."""
    if token is None:
        result.error = error
        return
    for draft_id, next_token in zip(draft_ids, next_tokens, strict=True):
        if draft_id != token.token_id or next_token is None:  # the step that samples here again reports an error
            break
        result.accepted_ids += (token.token_id,)
        if token.logprobs is not None:
            result.known_logprobs += (token.logprobs,)
        token = next_token
    result.token_id = token.token_id
    result.logprobs = token.logprobs
