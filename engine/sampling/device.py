"""An asynchronous sampler: sampled ids stay on the device while copies travel to the host.

Between `start` and `finish` nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from serve_llm.common.types import TokenLogprobs
from serve_llm.engine.sampling.logit_adjustments import SampleRow, pack_adjustments
from serve_llm.engine.sampling.sampler import (
    GREEDY,
    SampledToken,
    SamplerOutput,
    add_requested_ids,
    build_draws,
    is_greedy,
    is_unadjusted,
)
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits
from serve_llm.engine.transfer import DeviceCopier, PendingCopy
from serve_llm.kernels.sampling import DeviceSamplingKernels, Draw, LogitAdjustments, LogprobsTensors

LOGPROB_COLUMNS = len(LogprobsTensors._fields)


class DeviceSampler:
    """Samples like `Sampler`, with the same result on every rank of a group."""

    def __init__(self, vocabulary: VocabParallelLogits, kernels: DeviceSamplingKernels, copier: DeviceCopier) -> None:
        self._vocabulary = vocabulary
        self._kernels = kernels
        self._copier = copier
        self._kept_draws = torch.empty(0)

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """Start sampling. logits: (rows, shard or more), which only later work on the device may change.

        Rows with `Sampling.reads_history` must have all their ids; for other rows only the number of ids is read. If
        logits are sharded, whole rows are gathered unless every row only needs its most likely token.
        """
        if self._vocabulary.is_sharded and all(is_unadjusted(row) and is_greedy(row.sampling) for row in rows):
            ids = self._vocabulary.argmax(logits)
        else:
            logits = self._vocabulary.gather(logits)[:, : self._vocabulary.size]
            ids = self._sample(logits, rows)
        copies = [self._copier.to_host(ids)]
        with_logprobs = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        if with_logprobs:
            copies += self._start_logprobs(logits, ids, rows, with_logprobs)

        def finish() -> list[SampledToken | None]:
            token_ids, *columns = (copy.wait().tolist() for copy in copies)
            if not with_logprobs:
                return [SampledToken(token_id, None) if token_id >= 0 else None for token_id in token_ids]
            requested = iter(columns.pop() if len(columns) > LOGPROB_COLUMNS else ())
            logprobs = dict(zip(with_logprobs, zip(*columns, strict=True), strict=True))
            return [
                _build_token(row, token_ids[index], logprobs.get(index), requested) for index, row in enumerate(rows)
            ]

        return SamplerOutput(finish, lambda: copies[-1].is_ready, ids)

    def _sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        scores = self._adjust(logits, rows)
        if all(is_greedy(row.sampling) for row in rows):
            return self._kernels.sample(scores, self._greedy_draws(len(rows)), sampled=False, filtered=False)
        numbers = chain.from_iterable(build_draws(rows))
        draws = np.fromiter(numbers, np.float64, len(rows) * len(Draw._fields)).reshape(len(rows), -1)
        _, top_k, top_p, min_p, _ = draws.T
        return self._kernels.sample(
            scores,
            self._copier.to_device(draws),
            sampled=True,
            filtered=bool(((top_k > 0.0) | (top_p < 1.0) | (min_p > 0.0)).any()),
        )

    def _greedy_draws(self, num_rows: int) -> Tensor:
        """The draws of greedy rows, which are the same in every step."""
        if len(self._kept_draws) < num_rows:
            self._kept_draws = self._copier.to_device(np.tile(np.array(GREEDY), (num_rows, 1)))
        return self._kept_draws[:num_rows]

    def _adjust(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Apply biases, bans, penalties and grammar masks. Returns a copy if there are any, in float32 unless there are
        only masks."""
        entries, spans = pack_adjustments(rows, self._vocabulary.size)
        masks = [row.mask for row in rows if row.mask is not None]
        if not len(spans) and not masks:
            return logits
        scores = logits.to(torch.float32 if len(spans) else logits.dtype, copy=True)
        if len(spans):
            packed = self._copier.to_device(np.concatenate((entries.ravel(), spans.ravel())))
            adjustments = LogitAdjustments(packed[: entries.size].view(-1, 4), packed[entries.size :].view(-1, 6))
            self._kernels.adjust(scores, adjustments)
        if masks:
            indices = np.array([index for index, row in enumerate(rows) if row.mask is not None])
            self._kernels.apply_masks(scores, self._copier.to_device(indices), self._copier.to_device(np.stack(masks)))
        return scores

    def _start_logprobs(
        self, logits: Tensor, ids: Tensor, rows: Sequence[SampleRow], indices: list[int]
    ) -> list[PendingCopy]:
        """Compute log-probabilities of the rows at `indices`, as many for each as the most demanding row needs. Those
        of requested ids follow, row by row."""
        if len(indices) < len(rows):
            index = self._copier.to_device(np.array(indices))
            logits = logits[index]
            ids = ids[index]
        k = max(rows[index].sampling.logprobs or 0 for index in indices)
        requested = [
            (number, one) for number, index in enumerate(indices) for one in rows[index].sampling.logprob_token_ids
        ]
        found = self._kernels.log_softmax_gather(logits, ids, max(k, 1) if requested else k)
        columns: list[Tensor] = [*found]
        if requested:
            row_numbers, requested_ids = self._copier.to_device(np.array(requested).T)
            most_likely = found.top_ids[row_numbers, 0].clamp(
                0, logits.shape[1] - 1
            )  # undefined if logits are not finite
            distances = logits[row_numbers, requested_ids].double() - logits[row_numbers, most_likely].double()
            columns.append(found.top_logprobs[row_numbers, 0] + distances)
        return [self._copier.to_host(column) for column in columns]


def _build_token(
    row: SampleRow,
    token_id: int,
    logprobs: tuple[float, int, list[int], list[float]] | None,
    requested: Iterator[float],
) -> SampledToken | None:
    """requested: log-probabilities of the requested ids of this and the following rows."""
    requested_ids = row.sampling.logprob_token_ids
    requested_logprobs = list(islice(requested, len(requested_ids))) if logprobs is not None else []
    if token_id < 0:
        return None
    if logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(
        token_id,
        add_requested_ids(TokenLogprobs(*logprobs), row.sampling.logprobs or 0, requested_ids, requested_logprobs),
    )
