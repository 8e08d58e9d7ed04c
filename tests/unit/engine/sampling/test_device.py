"""The sampler that does not wait: its draws, and that it reads nothing from the device before `finish`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from serve_llm.common.types import Sampling
from serve_llm.engine.parallel.layout import split_range
from serve_llm.engine.sampling.device import DeviceSampler
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.sampler import SampledToken, Sampler
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.kernels import torch_sampling as sampling
from serve_llm.kernels.torch_sampling import SyncSamplingKernels
from support.ranks import Meeting, MemoryGroup, run_together
from support.triton import NO_TRITON, record

VOCAB, PADDED = 203, 210
CPU = torch.device("cpu")
STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 3.0}, "frequency_penalty": 0.5, "bad_words_ids": ((1, 2),), "logprobs": 5},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, VOCAB, 3)), "min_tokens": 9, "stop_token_ids": (0, 3)},
]


class Alone:
    """A vocabulary that is not sharded."""

    size = VOCAB
    is_sharded = False

    def gather(self, logits: Tensor) -> Tensor:
        return logits


@dataclass
class LateCopy:
    """A copy whose contents arrive only when it is waited for."""

    log: list[str]
    source: Tensor
    is_ready: bool = False

    def wait(self) -> Tensor:
        self.log.append("wait")
        self.is_ready = True
        return self.source.clone()


class LateTransfer:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.copies: list[LateCopy] = []

    def to_device(self, array: np.ndarray) -> Tensor:
        self.log.append(f"to device {array.dtype}")
        return torch.from_numpy(array)

    def to_host(self, tensor: Tensor) -> LateCopy:
        self.log.append("to host")
        self.copies.append(LateCopy(self.log, tensor))
        return self.copies[-1]


class Logged:
    """Kernels that record their calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **known: bool) -> object:
            self._log.append(" ".join((name, *(word for word, value in known.items() if value))))
            return getattr(sampling, name)(*args, **known)

        return call


def row(number: int, **params: Any) -> SampleRow:
    return SampleRow(Sampling(max_tokens=99, seed=number, **params), [1, 2, 3], [4, 1, 4, 1][: number % 5])


def random_logits(rows: int, seed: int = 0) -> Tensor:
    logits = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, VOCAB:] = 1000.0  # padding of the head
    return logits


def expected(logits: Tensor, rows: list[SampleRow]) -> list[SampledToken | None]:
    return Sampler(VOCAB, SyncSamplingKernels(sampling)).sample(logits.clone(), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_what_the_sampler_draws(dtype: torch.dtype) -> None:
    rows = [row(number, **STYLES[number % len(STYLES)]) for number in range(30)]
    logits = random_logits(30).to(dtype)
    logits[7, 3] = torch.nan
    before = logits.clone()
    drawn = DeviceSampler(Alone(), sampling, DeviceCopier(CPU)).start(logits, rows)  # type: ignore[arg-type]
    wanted = expected(before, rows)
    assert drawn.token_ids is not None and wanted[7] is None
    assert drawn.token_ids.tolist() == [-1 if sampled is None else sampled.token_id for sampled in wanted]
    assert drawn.finish() == wanted
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_asked_ids(dtype: torch.dtype) -> None:
    asked = {"logprobs": 2, "logprob_token_ids": (5, 0, VOCAB - 1)}
    rows = [row(0), row(1, **asked), row(2, logprobs=3), row(3, logprobs=0, logprob_token_ids=(7,)), row(4, **asked)]
    logits = random_logits(5, 3).to(dtype)
    logits[4, 9] = torch.nan
    wanted = expected(logits, rows)
    found = DeviceSampler(Alone(), sampling, DeviceCopier(CPU)).start(logits, rows).finish()  # type: ignore[arg-type]
    assert found == wanted and found[4] is None
    logprobs = logits[1, :VOCAB].double().log_softmax(0)
    one = found[1].logprobs  # type: ignore[union-attr]
    assert one is not None and one.top_ids == [*one.top_ids[:2], 5, 0, VOCAB - 1]
    assert one.top_logprobs == pytest.approx(logprobs[one.top_ids].tolist(), abs=1e-6)
    last = found[3].logprobs  # type: ignore[union-attr]
    assert last is not None and last.top_ids == [7]


def test_the_vocabulary_of_a_rank() -> None:
    class Single:
        rank, size = 0, 1

    vocabulary = VocabParallelLogits([range(VOCAB)], Single(), SyncSamplingKernels(sampling))  # type: ignore[arg-type]
    rows, logits = [row(1)], random_logits(1)
    drawn = DeviceSampler(vocabulary, sampling, DeviceCopier(CPU)).start(logits, rows)  # type: ignore[arg-type]
    assert drawn.finish() == expected(logits, rows)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_ranks_share_out(dtype: torch.dtype, ranks: int) -> None:
    """Every rank draws the ids of a single rank, exchanges no more than necessary, and never widens logits to
    float32."""
    name = str(dtype)
    whole = random_logits(12)[:, :VOCAB].to(dtype)
    whole[5] = whole[5].round()  # with ties
    whole[6, 150], whole[7, 2] = torch.nan, torch.inf
    borders = list(split_range(VOCAB, ranks))
    widest = max(map(len, borders))
    greedy = [row(number, temperature=0.0) for number in range(12)]
    mixed = [*greedy[:11], row(11, temperature=0.8)]
    for rows, call in ((greedy, "all_gather [2, 12] torch.float32"), (mixed, f"all_gather [12, {widest}] {name}")):
        meeting = Meeting(ranks)

        def draw(rank: int, rows: list[SampleRow] = rows, meeting: Meeting = meeting) -> tuple[list[str], Any, Any]:
            log: list[str] = []
            vocabulary = VocabParallelLogits(borders, MemoryGroup(meeting, rank), SyncSamplingKernels(sampling))
            own = whole[:, borders[rank].start : borders[rank].stop]
            drawn = DeviceSampler(vocabulary, Logged(log), LateTransfer(log)).start(own, rows)  # type: ignore[arg-type]
            assert log[-1] == "to host" and drawn.token_ids is not None
            return log, drawn.token_ids.tolist(), drawn.finish()

        wanted = expected(whole, rows)
        assert [place for place, sampled in enumerate(wanted) if sampled is None] == [6, 7]
        for log, ids, found in run_together(ranks, draw, meeting.abort):
            assert ids == [-1 if sampled is None else sampled.token_id for sampled in wanted]
            assert found == wanted
            assert log == ["to host", "wait"] or (rows is mixed and "sample sampled" in log)
        assert meeting.calls == [call]


def test_the_likeliest_of_ranks_is_not_read_from_the_device() -> None:
    class Group:
        rank, size = 1, 2

        def all_gather(self, x: Tensor) -> list[Tensor]:
            return [x, x]

    vocabulary = VocabParallelLogits([range(3), range(3, 9)], Group(), SyncSamplingKernels(sampling))
    assert vocabulary.argmax(torch.empty((4, 6), device="meta", dtype=torch.bfloat16)).shape == (4,)
    vocabulary = VocabParallelLogits([range(9), range(9, 9)], Group(), SyncSamplingKernels(sampling))
    assert vocabulary.argmax(torch.empty((4, 0), device="meta")).shape == (4,)


def test_the_order_of_copies_and_kernels() -> None:
    log: list[str] = []
    transfer = LateTransfer(log)
    rows = [row(number, **style) for number, style in enumerate(STYLES)]
    logits = random_logits(len(rows))
    drawn = DeviceSampler(Alone(), Logged(log), transfer).start(logits, rows)  # type: ignore[arg-type]
    copied = ["to device int32", "adjust", "to device float64", "sample sampled filtered", "to host"]
    asked = ["to device int64", "log_softmax_gather", *["to host"] * 4]
    assert log == copied + asked
    assert not drawn.is_ready()
    transfer.copies[0].is_ready = True
    assert not drawn.is_ready()  # ids have arrived, logprobs have not
    transfer.copies[-1].is_ready = True
    assert drawn.is_ready()
    assert drawn.finish() == expected(logits, rows)
    assert log[len(copied + asked) :] == ["wait"] * 5


@pytest.mark.parametrize(
    "style, known", [({"temperature": 0.0}, ""), ({}, " sampled"), ({"top_p": 0.5}, " sampled filtered")]
)
def test_no_more_work_than_the_rows_ask_for(style: dict[str, Any], known: str) -> None:
    log: list[str] = []
    DeviceSampler(Alone(), Logged(log), LateTransfer(log)).start(random_logits(2), [row(0, **style), row(3, **style)])  # type: ignore[arg-type]
    assert log == ["to device float64", f"sample{known}", "to host"]


def test_ids_that_are_not_there_yet_count() -> None:
    """If a row's parameters do not depend on its ids, only their number is read."""
    params: dict[str, Any] = {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (7,), "logit_bias": {7: 50.0}}
    params |= {"bad_words_ids": ((8,),), "logprobs": 1}
    assert not Sampling(max_tokens=1, seed=1, **params).reads_history
    logits = random_logits(1)
    for count in (2, 3):
        known = SampleRow(Sampling(max_tokens=99, seed=5, **params), [1, 2], [3] * count)
        coming = structs.replace(known, output_ids=np.array([3] * (count - 1) + [-1]))
        sampler = DeviceSampler(Alone(), sampling, DeviceCopier(CPU))  # type: ignore[arg-type]
        (found,) = sampler.start(logits, [coming]).finish()
        assert [found] == expected(logits, [known]) and found is not None
        assert (found.token_id == 7) == (count == 3)


def test_nothing_is_read_from_the_device() -> None:
    """A meta tensor has no numbers: reading one fails."""
    pytest.importorskip("triton", reason=NO_TRITON)
    from serve_llm.kernels.triton import sampling as compiled

    class ToMeta(LateTransfer):
        def to_device(self, array: np.ndarray) -> Tensor:
            return super().to_device(array).to("meta")

    rows = [row(number, **style) for number, style in enumerate(STYLES)]
    sampler = DeviceSampler(Alone(), compiled, ToMeta([]))
    logits = torch.empty((len(rows), PADDED), device="meta", dtype=torch.bfloat16)
    launches = record(lambda: sampler.start(logits, rows))
    names = {launch.kernel.name for launch in launches}
    assert {
        "_adjust",
        "_find_peaks",
        "_find_threshold",
        "_sum_segment_masses",
        "_draw",
        "_sum_exponentials",
        "_collect_top_k",
    } <= names
    with pytest.raises(RuntimeError):
        logits[0, 0].item()
