"""A step that has started, and additions to its results once they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.transfer import PendingWork

NOT_FINITE_VECTOR = "the vector that the model computed is not finite"


class PendingStep(NamedTuple):
    """A step that has started."""

    is_ready: Callable[[], bool]  # whether `finish` would return immediately
    finish: Callable[[], list[RunnerOutput]]  # one per ScheduledTokens, in order; empty on ranks that do not sample


NO_RESULTS = PendingStep(lambda: True, list)


def finish_after(work: PendingWork, results: list[RunnerOutput]) -> PendingStep:
    """A step that samples nothing. It has results once its work on the device is done, because its blocks may then be
    copied and filled by another stream (`HostBlocks.copy`), and so that the host does not start all steps of a long
    prompt at once."""

    def finish() -> list[RunnerOutput]:
        work.wait()
        return results

    return PendingStep(lambda: work.is_ready, finish)


def add_vectors(pending: PendingStep, vectors: Mapping[int, Tensor]) -> PendingStep:
    """`pending`, with vectors in its results. vectors: by index of the result."""
    if not vectors:
        return pending

    def finish() -> list[RunnerOutput]:
        results = pending.finish()
        for index, vector in vectors.items():
            if bool(vector.isfinite().all()):
                results[index].vector = vector.cpu().numpy().tobytes()
            else:
                results[index].error = NOT_FINITE_VECTOR
        return results

    return PendingStep(pending.is_ready, finish)


def add_hidden_states(pending: PendingStep, collected: Sequence[Tensor], query_starts: Sequence[int]) -> PendingStep:
    """`pending`, with hidden states in its results. collected: see `Decoder`."""
    if not collected:
        return pending
    states = torch.cat(tuple(collected), dim=-1)

    def finish() -> list[RunnerOutput]:
        results = pending.finish()
        on_host = states.cpu().view(torch.uint8).numpy()
        for result, start, end in zip(results, query_starts, query_starts[1:], strict=False):
            result.hidden_states = on_host[start:end].tobytes()
        return results

    return PendingStep(pending.is_ready, finish)
