"""Which tokens of a step ids are sampled after, and how these ids become a request's result."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.engine.sampling.sampler import SampledToken
from serve_llm.engine.scheduler.output import RunnerOutput, ScheduledTokens


def find_sampled_rows(scheduled: Sequence[ScheduledTokens], ends: Sequence[int]) -> list[int]:
    """The rows after which an id is sampled. ends: where the rows of each chunk end."""
    return [row for chunk, end in zip(scheduled, ends, strict=True) for row in range(end - chunk.num_samples, end)]


def add_sampled_tokens(
    result: RunnerOutput,
    token: SampledToken | None,
    draft_ids: Sequence[int],
    next_tokens: Sequence[SampledToken | None],
    error: str,
) -> None:
    """Add the tokens that the request goes on with: the first, and each that follows a draft that is the one before.

    token: sampled after the newest known token. next_tokens: after each draft. None where that fails. error: why the
    first one fails, if it does."""
    if token is None:
        result.error = error
        return
    for draft_id, next_token in zip(draft_ids, next_tokens, strict=True):
        if draft_id != token.token_id or next_token is None:  # an error is that of the step that samples there again
            break
        result.accepted_ids += (token.token_id,)
        if token.logprobs is not None:
            result.known_logprobs += (token.logprobs,)
        token = next_token
    result.token_id = token.token_id
    result.logprobs = token.logprobs
