"""The sampler of a rank that does not wait: ids are drawn and stay on the device, while their copies are on the way.

Between `start` and `finish` nothing is read from the device. Knows neither requests nor blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_llm.engine.sample.edits import pack
from serve_llm.engine.sample.sampler import Drawn, Sampled, SampleRow, draw_of, is_greedy, is_plain
from serve_llm.engine.types import TokenLogprobs
from serve_llm.kernels.device_sampling import DeviceSampling, Edits


class Arriving(Protocol):
    """A copy to the host, under way."""

    @property
    def is_there(self) -> bool: ...
    def wait(self) -> Tensor: ...


class Transfer(Protocol):
    """Copies in the order of the device's work, for none of which the host waits."""

    def to_device(self, array: npt.NDArray[np.generic], /) -> Tensor: ...
    def to_host(self, tensor: Tensor, /) -> Arriving: ...


class Head(Protocol):
    """Of `vocabulary.Vocabulary` what is needed here."""

    size: int
    is_shared_out: bool

    def whole(self, logits: Tensor, /) -> Tensor: ...
    def likeliest(self, logits: Tensor, /) -> Tensor: ...


class DeviceSampler:
    """One per worker. Draws what `Sampler` draws, on every rank of a group the same."""

    def __init__(self, vocabulary: Head, kernels: DeviceSampling, transfer: Transfer) -> None:
        self._vocabulary = vocabulary
        self._kernels = kernels
        self._transfer = transfer

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
        """Begin what `Sampler.sample` does; logits: (rows, own columns or more), not to be changed but by later work
        of the device. Rows with `Sampling.reads_history` have all their ids; of others their number is enough.

        Where ranks share out the columns, whole rows are gathered unless all want no more than the likeliest token.
        """
        if self._vocabulary.is_shared_out and all(is_plain(row) and is_greedy(row.sampling) for row in rows):
            ids = self._vocabulary.likeliest(logits)
        else:
            logits = self._vocabulary.whole(logits)[:, : self._vocabulary.size]
            ids = self._choose(logits, rows)
        arriving = [self._transfer.to_host(ids)]
        wanted = [place for place, row in enumerate(rows) if row.sampling.logprobs is not None]
        if wanted:
            arriving += self._start_logprobs(logits, ids, rows, wanted)

        def finish() -> list[Sampled | None]:
            chosen, *columns = (copy.wait().tolist() for copy in arriving)
            logprobs = dict(zip(wanted, zip(*columns, strict=True), strict=True))
            return [_sampled(row, chosen[place], logprobs.get(place)) for place, row in enumerate(rows)]

        return Drawn(finish, lambda: arriving[-1].is_there, ids)

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        scores = self._adjusted(logits, rows)
        draws = np.array([draw_of(row) for row in rows], np.float64)
        temperature, top_k, top_p, min_p, _ = draws.T
        return self._kernels.choose(
            scores,
            self._transfer.to_device(draws),
            sampled=bool((temperature > 0.0).any()),
            filtered=bool(((top_k > 0.0) | (top_p < 1.0) | (min_p > 0.0)).any()),
        )

    def _adjusted(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Logits with bias, bans and penalties: a copy in float32, if there are any."""
        entries, spans = pack(rows, self._vocabulary.size)
        if not len(spans):
            return logits
        packed = self._transfer.to_device(np.concatenate((entries.ravel(), spans.ravel())))
        edits = Edits(packed[: entries.size].view(-1, 4), packed[entries.size :].view(-1, 6))
        scores = logits.to(torch.float32, copy=True)
        self._kernels.adjust(scores, edits)
        return scores

    def _start_logprobs(
        self, logits: Tensor, ids: Tensor, rows: Sequence[SampleRow], wanted: list[int]
    ) -> list[Arriving]:
        """Log-probabilities of the rows that want them, as many as the one that wants most."""
        if len(wanted) < len(rows):
            index = self._transfer.to_device(np.array(wanted))
            logits, ids = logits[index], ids[index]
        found = self._kernels.log_softmax_gather(
            logits, ids, max(rows[place].sampling.logprobs or 0 for place in wanted)
        )
        return [self._transfer.to_host(column) for column in found]


def _sampled(row: SampleRow, token_id: int, found: tuple[float, int, list[int], list[float]] | None) -> Sampled | None:
    if token_id < 0:
        return None
    if found is None:
        return Sampled(token_id, None)
    logprob, rank, top_ids, top_logprobs = found
    k = row.sampling.logprobs or 0
    return Sampled(token_id, TokenLogprobs(logprob, rank, top_ids[:k], top_logprobs[:k]))
