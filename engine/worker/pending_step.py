"""A step that has started, and additions to its results once they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.transfer import DeviceCopier, PendingCopy, PendingWork

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


def add_vectors(pending: PendingStep, vectors: Mapping[int, Tensor], copier: DeviceCopier) -> PendingStep:
    """`pending`, with vectors in its results. vectors: by index of the result."""
    if not vectors:
        return pending
    copies = {index: copier.to_host(vector) for index, vector in vectors.items()}

    def finish() -> list[RunnerOutput]:
        results = pending.finish()
        for index, copy in copies.items():
            vector = copy.wait().numpy()
            if np.isfinite(vector).all():  # numpy takes a fraction of torch's time for so few numbers
                results[index].vector = vector.tobytes()
            else:
                results[index].error = NOT_FINITE_VECTOR
        return results

    return _ready_after(pending, copies.values(), finish)


def add_hidden_states(
    pending: PendingStep, collected: Sequence[Tensor], query_starts: Sequence[int], copier: DeviceCopier
) -> PendingStep:
    """`pending`, with hidden states in its results. collected: see `Decoder`."""
    if not collected:
        return pending
    copy = copier.to_host(torch.cat(tuple(collected), dim=-1))

    def finish() -> list[RunnerOutput]:
        results = pending.finish()
        on_host = copy.wait().view(torch.uint8).numpy()
        for result, start, end in zip(results, query_starts, query_starts[1:], strict=False):
            result.hidden_states = on_host[start:end].tobytes()
        return results

    return _ready_after(pending, [copy], finish)


def _ready_after(
    pending: PendingStep, copies: Collection[PendingCopy], finish: Callable[[], list[RunnerOutput]]
) -> PendingStep:
    """A step that `finish` ends, which waits for `pending` and the copies, but not for later work on the device."""
    return PendingStep(lambda: pending.is_ready() and all(copy.is_ready for copy in copies), finish)
