"""Adds the result of a step to its sequence, and builds the request's output."""

from __future__ import annotations

from serve_llm.common.types import EngineCoreOutput, FinishReason
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.sequence import Sequence


def add_result(sequence: Sequence, result: RunnerOutput, max_model_len: int) -> EngineCoreOutput | None:
    """Append the new ids to the sequence. Returns the request's output; None if there is nothing yet.

    Forced ids after a sampled one are sent with it, unless the request wants their log-probabilities. In this case,
    both come with the step that computes these ids.
    """
    if result.error is not None:
        return EngineCoreOutput(
            id=sequence.request.id,
            token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=result.error,
            is_contradiction=result.is_contradiction,
        )
    if result.prompt_logprobs is not None:
        sequence.prompt_logprobs.extend(result.prompt_logprobs)
    if result.vector is not None:
        sequence.vectors.append(result.vector)
    if result.token_id is not None:
        sequence.end_reason = _append_ids(sequence, result, max_model_len)
    elif sequence.sampling.max_tokens == 0:
        if sequence.num_computed < len(sequence.token_ids):
            return None  # more of the prompt follows
        sequence.end_reason = FinishReason.STOP if sequence.request.pooling else FinishReason.LENGTH
    elif not result.known_logprobs:
        return None
    return _build_output(sequence, result)


def _append_ids(sequence: Sequence, result: RunnerOutput, max_model_len: int) -> FinishReason | None:
    """Append the sampled ids and the forced ids after them, up to the request's limits. Returns the finish reason, if
    the request ends."""
    assert result.token_id is not None
    new_ids = [*result.accepted_ids, result.token_id, *result.forced_ids]
    for number, token_id in enumerate(new_ids, start=1):
        sequence.token_ids.append(token_id)
        if result.ends_text and number == len(new_ids):
            return FinishReason.STOP
        reason = sequence.finish_reason(max_model_len)
        if reason is not None:
            return reason
    return None


def _build_output(sequence: Sequence, result: RunnerOutput) -> EngineCoreOutput:
    new_ids = sequence.token_ids[sequence.num_delivered :]
    logprobs = None
    if sequence.sampling.logprobs is not None and new_ids:
        logprobs = list(result.known_logprobs)
        if result.logprobs is not None:
            logprobs.append(result.logprobs)
        new_ids = new_ids[: len(logprobs)]
        logprobs = logprobs[: len(new_ids)]  # an accepted draft may end the request
    sequence.num_delivered += len(new_ids)
    vector = b"".join(sequence.vectors) if sequence.request.pooling else None
    output = EngineCoreOutput(id=sequence.request.id, token_ids=new_ids, logprobs=logprobs, vector=vector)
    if sequence.num_delivered == len(sequence.token_ids):
        output.finish_reason = sequence.end_reason
        if output.finish_reason is FinishReason.STOP and not result.ends_text and result.token_id is not None:
            output.stop_id = sequence.token_ids[-1]
    if not sequence.is_admission_reported:
        sequence.is_admission_reported = True
        output.cached_tokens = sequence.cached_tokens
        output.queued_seconds = sequence.queued_seconds
    if sequence.num_preemptions:
        output.num_preemptions = sequence.num_preemptions
        sequence.num_preemptions = 0
    if sequence.wants_prompt_logprobs:
        output.prompt_logprobs = sequence.prompt_logprobs
        sequence.prompt_logprobs = []
        sequence.are_prompt_logprobs_sent = True
    return output
