"""Sampling on a GPU, in Triton's interpreter: the same tokens and log-probabilities as the definitions in torch."""

from __future__ import annotations

import math

import pytest
import torch

from support.matrix import mostly_slow
from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)

from serve_llm.kernels import torch_sampling as reference
from serve_llm.kernels.sampling import BANNED, REPEATED, SPAN_COLUMNS, DeviceSamplingKernels, Draw, LogitAdjustments
from serve_llm.kernels.torch_sampling import SyncSamplingKernels
from serve_llm.kernels.triton import sampling, thresholds

KERNELS: DeviceSamplingKernels = sampling
GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)
PLAIN = Draw(1.0, 0, 1.0, 0.0, 0.5)
CASES = [
    (1, torch.float32),
    (2, torch.bfloat16),
    (65, torch.float16),
    (1025, torch.float32),
    (4096, torch.bfloat16),
    (5003, torch.float32),
]


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_draws(rows: int, seed: int) -> torch.Tensor:
    pick = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(rows, generator=pick, dtype=torch.float64) * (high - low) + low

    top_k = torch.tensor([0, 0, 1, 2, 50, 200, 4000])[torch.randint(7, (rows,), generator=pick)]
    top_p = torch.where(uniform(0, 1) < 0.4, 1.0, uniform(0.01, 0.9999))
    min_p = torch.where(uniform(0, 1) < 0.6, 0.0, uniform(0.001, 1.0))
    return torch.stack([uniform(0.05, 3.0), top_k.double(), top_p, min_p, uniform(0, 1)], 1)


def draws_of(*draws: Draw) -> torch.Tensor:
    return torch.tensor(draws, dtype=torch.float64)


def is_close_call(logits: torch.Tensor, draw: torch.Tensor) -> bool:
    """Return whether the definition itself changes its answer when noise, top_p or min_p changes by a millionth."""
    found = set()
    for field in (2, 3, 4):
        for step in (-1e-6, 1e-6):
            moved = draw.clone()
            moved[field] = (moved[field] + step).clamp(0.0, 1.0)
            if field == 4 or 0.0 < draw[field] < 1.0:
                found.add(int(reference.sample(logits[None], moved[None])[0]))
    return len(found) > 1


def assert_same_draws(logits: torch.Tensor, draws: torch.Tensor) -> None:
    found, wanted = KERNELS.sample(logits, draws), reference.sample(logits, draws)
    assert found.dtype == torch.int64
    for row in (found != wanted).nonzero().flatten().tolist():
        assert is_close_call(logits[row], draws[row]), (row, found[row], wanted[row], draws[row])
    assert (found == wanted).sum() >= len(logits) - 1


@pytest.mark.parametrize("vocab, dtype", mostly_slow(CASES, [CASES[0], CASES[3]]))
def test_draws_what_the_definition_draws(vocab: int, dtype: torch.dtype) -> None:
    assert_same_draws(random_logits(6, vocab, vocab).to(dtype), random_draws(6, vocab))


@pytest.mark.parametrize("distinct", [1, 3])
def test_equal_logits_stay_or_go_together(distinct: int) -> None:
    logits = torch.randint(0, distinct, (4, 4099), generator=torch.Generator().manual_seed(distinct)).float()
    assert_same_draws(logits, random_draws(4, distinct))


def test_more_values_above_the_bound_than_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MAX_CANDIDATES", 64)  # then the rows themselves are searched
    logits = random_logits(4, 4500, 3, scale=0.5)
    assert_same_draws(
        logits,
        draws_of(*(Draw(1.0, k, p, m, 0.6) for k, p, m in [(0, 0.7, 0), (400, 1, 0), (900, 0.5, 0.1), (4499, 0.9, 0)])),
    )


def test_every_column_is_drawn_by_its_share() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(20, 1)
    noises = [(number + 0.5) / 20 for number in range(20)]
    found = KERNELS.sample(logits, draws_of(*(PLAIN._replace(noise=noise) for noise in noises)), filtered=False)
    assert found.tolist() == [0] * 2 + [1] * 4 + [2] * 6 + [3] * 8


def test_the_ends_of_the_noise_never_draw_a_column_without_weight() -> None:
    logits = torch.full((2, 5000), -math.inf)
    logits[:, 7] = logits[:, 4800] = 1.0
    found = KERNELS.sample(logits, draws_of(PLAIN._replace(noise=0.0), PLAIN._replace(noise=math.nextafter(1.0, 0.0))))
    assert found.tolist() == [7, 4800]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = random_logits(3, 9001, 1).bfloat16()
    logits[0, [8999, 4095, 4096]] = 50.0
    logits[1, 9000] = 50.0
    logits[2] = -0.0
    logits[2, 5] = 0.0
    for known in ({}, {"filtered": False}, {"sampled": False, "filtered": False}):
        assert KERNELS.sample(logits, draws_of(GREEDY, GREEDY, GREEDY), **known).tolist() == [4095, 9000, 0]


@pytest.mark.parametrize("draw", [GREEDY, PLAIN, Draw(0.7, 3, 0.9, 0.1, 0.3)])
def test_rows_without_a_finite_maximum(draw: Draw) -> None:
    logits = random_logits(5, 4200, 2)
    logits[0, 4111] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    logits[3, :4100] = -math.inf
    found = KERNELS.sample(logits, draws_of(*[draw] * 5)).tolist()
    assert found[:3] == [-1, -1, -1] and 4100 <= found[3] < 4200 and found[4] >= 0


def test_a_row_is_the_same_alone_and_in_other_memory() -> None:
    logits, draws = random_logits(3, 700, 4), random_draws(3, 4)
    together = KERNELS.sample(logits, draws)
    wide = torch.full((3, 900), math.nan)
    wide[:, :700] = logits
    for row in range(3):
        assert KERNELS.sample(wide[row : row + 1, :700], draws[row : row + 1])[0] == together[row]
        assert KERNELS.sample(logits.T.contiguous().T[row : row + 1], draws[row : row + 1])[0] == together[row]


@pytest.mark.parametrize("k", [0, 5, 300])
@pytest.mark.parametrize("vocab, dtype", [(1, torch.float32), (100, torch.float16), (4500, torch.bfloat16)])
def test_log_softmax(vocab: int, dtype: torch.dtype, k: int) -> None:
    logits = random_logits(3, vocab, vocab).to(dtype)
    ids = torch.tensor([0, vocab - 1, vocab // 2])
    found, wanted = KERNELS.log_softmax_gather(logits, ids, k), reference.log_softmax_gather(logits, ids, k)
    assert found.top_ids.shape == (3, min(k, vocab))
    assert torch.equal(found.rank, wanted.rank) and torch.equal(found.top_ids, wanted.top_ids)
    torch.testing.assert_close(found.logprob, wanted.logprob, rtol=0.0, atol=2e-6)
    torch.testing.assert_close(found.top_logprobs, wanted.top_logprobs, rtol=0.0, atol=2e-6)


def test_log_softmax_lists_equal_logits_in_the_order_of_ids() -> None:
    logits = torch.zeros(1, 4200)
    logits[0, [4150, 30, 2000]] = torch.tensor([2.0, 1.0, 1.0])
    found = KERNELS.log_softmax_gather(logits, torch.tensor([2000]), 6)
    assert found.top_ids.tolist() == [[4150, 30, 2000, 0, 1, 2]] and found.rank.tolist() == [2]


def test_log_softmax_of_rows_that_are_not_finite() -> None:
    logits = random_logits(4, 70, 1)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    found = KERNELS.log_softmax_gather(logits, torch.tensor([1, 3, -1, -1]), 4)
    assert found.rank[:3].tolist() == [0, 0, 0] and found.rank[3] > 0
    assert bool(((found.top_ids >= 0) & (found.top_ids < 70)).all())


def test_as_the_kernels_that_answer_in_lists() -> None:
    lists, logits = SyncSamplingKernels(KERNELS), random_logits(3, 300, 6)
    draws = [GREEDY, PLAIN, Draw(0.8, 20, 0.9, 0.05, 0.2)]
    assert lists.sample(logits, draws) == SyncSamplingKernels(reference).sample(logits, draws)
    for found, wanted in zip(
        lists.logprobs(logits, [5, 6, 7], 3), SyncSamplingKernels(reference).logprobs(logits, [5, 6, 7], 3), strict=True
    ):
        assert found.rank == wanted.rank and found.top_ids == wanted.top_ids
        assert found.logprob == pytest.approx(wanted.logprob, abs=2e-6)
    logits[1, 0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        lists.logprobs(logits, [5, 6, 7], 3)


def test_other_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        KERNELS.sample(torch.zeros(1, 4, dtype=torch.float64), draws_of(GREEDY))
    with pytest.raises(ValueError, match="1,048,577"):
        KERNELS.sample(torch.zeros(1, 1, dtype=torch.bfloat16).expand(1, 2**20 + 1), draws_of(GREEDY))


def test_adjusts_as_the_definition() -> None:
    vocab, pick = 2500, torch.Generator().manual_seed(8)
    columns = torch.randperm(vocab, generator=pick)[:SPAN_COLUMNS].sort().values.int()
    entries = torch.empty((len(columns), 4), dtype=torch.int32)
    entries[:, 0] = columns
    entries[:, 2] = torch.randint(0, (BANNED | REPEATED) + 1, (len(columns),), generator=pick)
    for field in (1, 3):
        entries[:, field] = torch.randn(len(columns), generator=pick).view(torch.int32)
    penalty = int(torch.tensor(1.3).view(torch.int32))
    begin, end = SPAN_COLUMNS, 2 * SPAN_COLUMNS
    first, last = torch.searchsorted(columns, torch.tensor([begin, end])).tolist()
    spans = [[2, 0, len(columns), penalty, 0, 0], [0, 5, 6, penalty, 0, 0], [1, first, last, penalty, begin, end]]
    edits = LogitAdjustments(entries, torch.tensor(spans, dtype=torch.int32))
    found = random_logits(4, vocab, 9)
    wanted, before = found.clone(), found.clone()
    KERNELS.adjust(found, edits)
    reference.adjust(wanted, edits)
    assert torch.equal(found, wanted)
    assert torch.equal(found[3], before[3]) and torch.equal(found[1, :begin], before[1, :begin])
    assert (found[1, begin:end] == -math.inf).sum() >= end - begin - (last - first)


@pytest.mark.slow
def test_is_compiled_for_a_gpu() -> None:
    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    def launch() -> None:
        logits, draws = meta(256, 151936, dtype=torch.bfloat16), meta(256, 5, dtype=torch.float64)
        KERNELS.sample(logits, draws)
        KERNELS.sample(logits, draws, filtered=False)
        KERNELS.sample(logits, draws, sampled=False, filtered=False)
        KERNELS.log_softmax_gather(logits, meta(256, dtype=torch.int64), 20)
        edits = LogitAdjustments(meta(999, 4, dtype=torch.int32), meta(9, 6, dtype=torch.int32))
        KERNELS.adjust(logits.float(), edits)
        rows, masks = meta(16, dtype=torch.int64), meta(16, 4748, dtype=torch.int32)
        KERNELS.apply_masks(logits.float(), rows, masks)

    launches = record(launch)
    assert len({each.kernel.name for each in launches}) == 11
    found = compile_for(launches)
    assert_fits(found, stack_bytes=32)
    for kernel in found:
        assert ("atom" in kernel.ptx) == (
            kernel.launch.kernel.name == "_collect_candidates"
        )  # on integers, in one place
        assert "atom.global.gpu.acq_rel.add.f" not in kernel.ptx


@pytest.mark.parametrize(("vocab", "dtype"), CASES)
def test_masks_of_grammars(vocab: int, dtype: torch.dtype) -> None:
    scores = random_logits(4, vocab, vocab).float()
    masks = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=torch.Generator().manual_seed(vocab))
    rows, masks = torch.tensor([3, 1]), masks.to(torch.int32)
    expected = scores.clone()
    reference.apply_masks(expected, rows, masks)
    KERNELS.apply_masks(scores, rows, masks)
    assert torch.equal(scores, expected)
    assert (scores[[3, 1]] == -torch.inf).any() or vocab < 3
    assert scores[[0, 2]].isfinite().all()
