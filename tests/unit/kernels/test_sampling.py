"""Sampling and logprobs: every compiled variant that this processor supports, the torch definition and a plain float64
sort must all agree."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.kernels import torch_sampling as definition
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.sampling import CpuSamplingKernels
from serve_llm.kernels.sampling import Draw
from serve_llm.kernels.torch_sampling import SyncSamplingKernels
from support.matrix import mostly_slow

COMPILED = library.find()
REFERENCE = SyncSamplingKernels(definition)
FAST: dict[str, Any] = {}
if COMPILED is not None:
    FAST = {variant: CpuSamplingKernels(Library(COMPILED, variant)) for variant in Library(COMPILED).variants}
BOTH = pytest.mark.parametrize("kernel", [*FAST.values(), REFERENCE], ids=[*FAST, "reference"])
EVERY_FAST = pytest.mark.parametrize("kernel", FAST.values(), ids=FAST)
GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)
VOCABS = [1, 2, 7, 63, 1025, 5003]


def distribution(logits: torch.Tensor, draw: Draw) -> npt.NDArray[np.float64]:
    """Return the probability of each id, by sorting everything in float64."""
    values = logits.numpy().astype(np.float64) / draw.temperature
    weights = np.exp(values - values.max())
    keep = weights >= draw.min_p
    if draw.top_k:
        keep &= values >= np.sort(values)[::-1][min(draw.top_k, len(values)) - 1]
    weights = np.where(keep, weights, 0.0)
    if draw.top_p < 1.0:
        falling = np.sort(values)[::-1]
        sums = np.concatenate(([0.0], np.cumsum(weights[np.argsort(-values, kind="stable")])))
        heavier = sums[np.searchsorted(-falling, -values, side="left")]  # mass of strictly larger values
        weights[heavier >= draw.top_p * weights.sum()] = 0.0
    return weights / weights.sum()


def expected(probabilities: npt.NDArray[np.float64], noise: float) -> tuple[int, bool]:
    """Return the id that the noise selects, and whether the noise is too close to a boundary to be sure."""
    borders = np.cumsum(probabilities)
    return int(np.searchsorted(borders, noise, side="right")), bool(np.abs(borders - noise).min() < 1e-6)


draws = st.builds(
    Draw,
    temperature=st.floats(0.05, 4.0),
    top_k=st.sampled_from([0, 1, 2, 50, 4000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    noise=st.floats(0.0, 1.0, exclude_max=True),
)


@BOTH
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS), scale=st.sampled_from([0.3, 3.0, 20.0]), draw=draws)
def test_every_filter(kernel: Any, seed: int, vocab: int, scale: float, draw: Draw) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale
    token_id, unsure = expected(distribution(logits, draw), draw.noise)
    if not unsure:
        assert kernel.sample(logits.unsqueeze(0), [draw]) == [token_id]


@EVERY_FAST
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS), draw=draws, distinct=st.integers(1, 9))
def test_equal_logits_stay_or_go_together(kernel: Any, seed: int, vocab: int, draw: Draw, distinct: int) -> None:
    logits = torch.randint(0, distinct, (1, vocab), generator=torch.Generator().manual_seed(seed)).float()
    token_id, unsure = expected(distribution(logits[0], draw), draw.noise)
    if not unsure:
        assert kernel.sample(logits, [draw]) == REFERENCE.sample(logits, [draw]) == [token_id]


@BOTH
@pytest.mark.parametrize(
    ("draw", "kept"),
    [
        (Draw(1.0, 0, 1.0, 0.0, 0.0), {0, 1, 2, 3, 4, 5}),
        (Draw(1.0, 2, 1.0, 0.0, 0.0), {1, 3, 4}),  # 3 and 4 tie for the second place
        (Draw(1.0, 3, 1.0, 0.0, 0.0), {1, 3, 4}),
        (Draw(1.0, 0, 0.499, 0.0, 0.0), {1}),
        (Draw(1.0, 0, 0.501, 0.0, 0.0), {1, 3, 4}),
        (Draw(1.0, 0, 0.874, 0.0, 0.0), {1, 3, 4}),
        (Draw(1.0, 0, 0.876, 0.0, 0.0), {0, 1, 2, 3, 4, 5}),
        (Draw(1.0, 3, 0.57, 0.0, 0.0), {1}),  # top_p applies to what top_k left: id 1 has 4/7 of that
        (Draw(1.0, 3, 0.58, 0.0, 0.0), {1, 3, 4}),
        (Draw(1.0, 0, 1.0, 0.25, 0.0), {1, 3, 4}),
        (Draw(0.5, 0, 1.0, 0.25, 0.0), {1}),  # temperature comes before min_p: 1/16 of the likeliest
        (Draw(1.0, 0, 1e-9, 0.0, 0.0), {1}),
        (Draw(1.0, 0, 1.0, 1.0, 0.0), {1}),
    ],
)
def test_what_is_kept(kernel: Any, draw: Draw, kept: set[int]) -> None:
    probabilities = [1 / 24, 1 / 2, 1 / 24, 3 / 16, 3 / 16, 1 / 24]
    logits = torch.tensor([probabilities]).log().repeat(400, 1)
    grid = [draw._replace(noise=(i + 0.5) / 400) for i in range(400)]
    assert set(kernel.sample(logits, grid)) == kept


@BOTH
def test_inverse_of_the_cumulative_distribution_in_id_order(kernel: Any) -> None:
    logits = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).log()
    for noise, token_id in [(0.0, 0), (0.2499, 0), (0.2501, 2), (0.7499, 2), (0.7501, 3), (1 - 2**-53, 3)]:
        assert kernel.sample(logits, [Draw(1.0, 0, 1.0, 0.0, noise)]) == [token_id]


@EVERY_FAST
def test_borders_between_blocks_of_the_sum(kernel: Any) -> None:
    logits = torch.zeros(1, 2048).expand(2048, -1)
    assert kernel.sample(logits, [Draw(1.0, 0, 1.0, 0.0, i / 2048) for i in range(2048)]) == list(range(2048))


@EVERY_FAST
@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("top_p", mostly_slow([0.01, 0.2, 0.5, 0.8, 0.95, 0.999], [0.2, 0.95]))
def test_wide_nucleus(kernel: Any, scale: float, top_p: float) -> None:
    """Thousands of tokens are needed, so the binary search takes several rounds, up and down."""
    logits = torch.randn(30_011, generator=torch.Generator().manual_seed(1)) * scale
    for noise in (0.03, 0.5, 0.97):
        draw = Draw(1.0, 0, top_p, 0.0, noise)
        token_id, _ = expected(distribution(logits, draw), noise)
        (found,) = kernel.sample(logits.unsqueeze(0), [draw])
        assert abs(found - token_id) <= 1  # one place of 30,000: the boundaries are that close


@BOTH
def test_noise_near_one_never_draws_an_impossible_token(kernel: Any) -> None:
    logits = torch.randn(1, 5003, generator=torch.Generator().manual_seed(0))
    logits[0, 4990:] = -math.inf
    logits[0, :3] = -math.inf
    for noise in (0.0, 5e-324, 1 - 2**-53):
        (token_id,) = kernel.sample(logits, [Draw(1.0, 0, 1.0, 0.0, noise)])
        assert 3 <= token_id < 4990


@BOTH
def test_greedy_takes_the_lowest_of_equals(kernel: Any) -> None:
    logits = torch.zeros(3, 5003)
    logits[1, [17, 4000]] = 1.0
    logits[2] = -math.inf
    logits[2, 9] = -5.0
    assert kernel.sample(logits, [GREEDY] * 3) == [0, 17, 9]
    assert kernel.sample(logits, [GREEDY, GREEDY, Draw(1.0, 0, 1.0, 0.0, 0.5)]) == [0, 17, 9]


@BOTH
@pytest.mark.parametrize("draw", [GREEDY, Draw(1.0, 5, 0.9, 0.1, 0.5)])
def test_rows_that_are_not_finite(kernel: Any, draw: Draw) -> None:
    logits = torch.zeros(5, 100)
    logits[1, 50] = math.nan
    logits[2, 50] = math.inf
    logits[3] = -math.inf
    chosen = kernel.sample(logits, [draw] * 5)
    assert chosen[1:4] == [-1, -1, -1] and chosen[0] >= 0 and chosen[4] == chosen[0]


@BOTH
@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_extreme_temperatures_do_not_overflow(kernel: Any, temperature: float) -> None:
    logits = torch.tensor([[-3e38, 0.0, 3e38, 1e30]])
    assert kernel.sample(logits, [Draw(temperature, 0, 0.9, 0.0, 0.99)]) == [2]


@EVERY_FAST
def test_frequencies_follow_the_distribution(kernel: Any) -> None:
    """Chi-square over 20,000 evenly spread draws of 50 tokens in random order."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 2
    draw = Draw(1.3, 0, 0.97, 0.01, 0.0)
    noise = np.random.default_rng(5).random(20_000)
    chosen = kernel.sample(logits.expand(20_000, -1), [draw._replace(noise=float(u)) for u in noise])
    probabilities = distribution(logits[0], draw)
    counts = np.bincount(chosen, minlength=50)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    wanted = probabilities[possible] * 20_000
    assert possible.sum() == 33 and ((counts[possible] - wanted) ** 2 / wanted).sum() < 62.5  # 99.9 % at 32 degrees


@EVERY_FAST
def test_a_row_does_not_depend_on_its_neighbours(kernel: Any) -> None:
    """At any place in any batch, even if a row begins at an odd address."""
    generator = torch.Generator().manual_seed(11)
    pick = np.random.default_rng(11)
    row = torch.randn(4999, generator=generator) * 2
    styles = [Draw(1.0, 0, 1.0, 0.0, 0.7), Draw(1.3, 0, 0.9, 0.0, 0.31), Draw(0.8, 40, 0.95, 0.01, 0.99), GREEDY]
    alone = [kernel.sample(row.unsqueeze(0), [style])[0] for style in styles]
    probability = kernel.logprobs(row.unsqueeze(0), [42], 5)[0]
    for _ in range(50):
        batch = torch.randn(int(pick.integers(1, 9)), 4999, generator=generator) * 3
        place = int(pick.integers(len(batch)))
        batch[place] = row
        others = [styles[i] for i in pick.integers(len(styles), size=len(batch))]
        for style, token_id in zip(styles, alone, strict=True):
            others[place] = style
            assert kernel.sample(batch, others)[place] == token_id
        assert kernel.logprobs(batch, [42] * len(batch), 5)[place] == probability


@BOTH
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS), k=st.integers(0, 25), distinct=st.booleans())
def test_logprobs(kernel: Any, seed: int, vocab: int, k: int, distinct: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab, generator=generator) * 5
    if not distinct:
        logits = logits.round()
    ids = torch.randint(0, vocab, (2,), generator=generator).tolist()
    found = kernel.logprobs(logits, ids, k)
    wanted = logits.double().log_softmax(1)
    for row, token_id, answer in zip(range(2), ids, found, strict=True):
        likeliest = sorted(range(vocab), key=lambda i: (-float(logits[row, i]), i))[:k]
        assert answer.logprob == pytest.approx(float(wanted[row, token_id]), abs=1e-5)
        assert answer.rank == 1 + int((logits[row] > logits[row, token_id]).sum())
        assert answer.top_ids == likeliest
        assert answer.top_logprobs == pytest.approx([float(wanted[row, i]) for i in likeliest], abs=1e-5)


@BOTH
def test_logprobs_of_broken_logits(kernel: Any) -> None:
    with pytest.raises(ValueError, match="not finite"):
        kernel.logprobs(torch.tensor([[0.0, math.nan]]), [0], 1)


@BOTH
@pytest.mark.parametrize("vocab", VOCABS)
def test_likeliest_and_largest(kernel: Any, vocab: int) -> None:
    logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4).round() / 2  # many are equal
    assert kernel.argmax(logits).tolist() == [row.tolist().index(row.max()) for row in logits]
    for k in {1, min(3, vocab), vocab}:
        for row, found in zip(logits, kernel.top_k(logits, k), strict=True):
            floor = sorted(row.tolist())[-k]
            assert found.tolist() == [token_id for token_id, value in enumerate(row.tolist()) if value >= floor]


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_likeliest_and_largest_of_broken_rows(kernel: Any, value: float) -> None:
    logits = torch.tensor([[1.0, 5.0, value, 2.0], [4.0, 3.0, 2.0, 4.0]])
    assert kernel.argmax(logits).tolist() == [2, 0]
    assert [found.tolist() for found in kernel.top_k(logits, 2)] == [[2], [0, 3]]
    nothing = torch.full((1, 3), -math.inf)
    assert len(kernel.top_k(nothing, 2)[0]) == 1


# Vocabularies of real models, and rows from which selecting is hard.

WHOLE = 151_936
SOME_DRAWS = [
    GREEDY,
    Draw(1.0, 0, 1.0, 0.0, 0.99),
    Draw(0.8, 0, 0.9, 0.0, 0.37),
    Draw(1.0, 50, 1.0, 0.0, 0.0),
    Draw(1.3, 5000, 0.95, 0.0, 0.6),
    Draw(1.0, 0, 0.999, 0.02, 0.99),
]


@functools.cache
def hard_rows(vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn((8, vocab), generator=generator) * torch.tensor(
        [[0.02], [1.0], [3.0], [12.0], [3.0], [1], [1], [1]]
    )
    rows[4, torch.rand(vocab, generator=generator) < 0.999] = -math.inf  # only a few are allowed
    rows[4, vocab // 2] = 0.0
    rows[5] = 2.5
    rows[6] = rows[6].round()  # many equals
    rows[7] = -3e38  # one exceeds all others by more than float32 can represent
    rows[7, vocab // 3] = 3e38
    return rows


@functools.cache
def hard_answers(vocab: int, dtype: torch.dtype) -> list[list[int]]:
    return [REFERENCE.sample(hard_rows(vocab).to(dtype), [draw] * 8) for draw in SOME_DRAWS]


def probability_between(logits: torch.Tensor, draw: Draw, ids: list[int]) -> float:
    """Return the probability of the ids from the lower to the higher one, without that of the more likely one."""
    probabilities = distribution(logits, draw)[min(ids) : max(ids) + 1]
    return float(probabilities.sum() - probabilities.max())


@EVERY_FAST
@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("vocab", [1, 7, 1000, WHOLE])
def test_hard_rows(kernel: Any, vocab: int, dtype: torch.dtype) -> None:
    """As the definition; a different id only if the noise is next to a boundary."""
    logits = hard_rows(vocab).to(dtype)
    for draw, wanted in zip(SOME_DRAWS, hard_answers(vocab, dtype), strict=True):
        found = kernel.sample(logits, [draw] * 8)
        for row, ids in zip(logits.float(), zip(wanted, found, strict=True), strict=True):
            assert ids[0] == ids[1] or (draw != GREEDY and probability_between(row, draw, list(ids)) < 1e-5)
    for k in {1, min(vocab, 40), min(vocab, 900)}:
        for wanted_ids, found_ids in zip(REFERENCE.top_k(logits, k), kernel.top_k(logits, k), strict=True):
            assert found_ids.tolist() == wanted_ids.tolist()
    assert kernel.argmax(logits).tolist() == REFERENCE.argmax(logits).tolist()
    ids = [n % vocab for n in range(8)]
    for wanted_row, found_row in zip(REFERENCE.logprobs(logits, ids, 9), kernel.logprobs(logits, ids, 9), strict=True):
        assert (found_row.rank, found_row.top_ids) == (wanted_row.rank, wanted_row.top_ids)
        assert found_row.logprob == pytest.approx(wanted_row.logprob, abs=2e-5)
        assert found_row.top_logprobs == pytest.approx(wanted_row.top_logprobs, abs=2e-5)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(COMPILED is None, reason="the kernels were not compiled")
def test_threads_and_instruction_sets_do_not_show(threads: None) -> None:
    """Instruction sets with fused multiply-add give the same bits; those without may round differently."""
    logits, ids = hard_rows(WHOLE)[:5].contiguous(), [3, 1, 4, 1, 5]
    results = []
    for kernel in (FAST[variant] for variant in FAST if variant != "baseline"):
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            drawn = [kernel.sample(logits, [draw] * 5) for draw in SOME_DRAWS]
            mixed = kernel.sample(logits, SOME_DRAWS[1:])
            results.append((drawn, mixed, kernel.logprobs(logits, ids, 5)))
    assert all(result == results[0] for result in results)
    for drawn, mixed, _ in results:
        assert mixed == [drawn[1 + place][place] for place in range(5)]


@EVERY_FAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", mostly_slow([0, 255, 256, 100_000, WHOLE - 1], [0, WHOLE - 1]))
def test_one_broken_number_anywhere(kernel: Any, place: int, value: float, dtype: torch.dtype) -> None:
    logits = hard_rows(WHOLE)[4:6].to(dtype, copy=True)
    logits[0, place] = value
    logits[1, WHOLE - 9 :] = -math.inf
    for draw in (GREEDY, Draw(1.0, 5, 0.9, 0.1, 0.5), Draw(1.0, 0, 1.0, 0.0, 0.5)):
        chosen = kernel.sample(logits, [draw] * 2)
        assert chosen[0] == -1 and 0 <= chosen[1] < WHOLE - 9
    assert kernel.argmax(logits)[0] == place
    with pytest.raises(ValueError, match="not finite"):
        kernel.logprobs(logits, [0, 0], 1)


@EVERY_FAST
def test_rows_of_a_wider_matrix(kernel: Any) -> None:
    wide = torch.randn((3, 1100), generator=torch.Generator().manual_seed(1))
    wide[:, 1000:] = 99.0
    for draw in SOME_DRAWS:
        assert kernel.sample(wide[:, :1000], [draw] * 3) == kernel.sample(wide[:, :1000].contiguous(), [draw] * 3)


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
def test_a_library_with_another_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILED is not None
    monkeypatch.setattr(Draw, "_fields", (*Draw._fields, "one_more"))
    with pytest.raises(OSError, match="was compiled from other sources; install serve-llm again"):
        CpuSamplingKernels(Library(COMPILED))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 203, 4096, 20001])
def test_masks_of_grammars(kernel: Any, vocab: int, dtype: torch.dtype) -> None:
    allowed = np.random.default_rng(vocab).random((3, vocab)) < 0.5
    allowed[2, 40:] = False
    allowed[1, :99] = True
    padded = np.pad(allowed, ((0, 0), (0, -vocab % 32)))
    masks = torch.from_numpy(np.packbits(padded, 1, bitorder="little").view(np.int32))
    scores = torch.randn(5, vocab + 8, generator=torch.Generator().manual_seed(vocab)).to(dtype)[:, :vocab]
    expected = scores.clone()
    for row, one in zip((4, 0, 2), allowed, strict=True):
        expected[row, torch.from_numpy(~one)] = -torch.inf
    kernel.apply_masks(scores, [4, 0, 2], masks)
    assert torch.equal(scores, expected)


@EVERY_FAST
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS), share=st.sampled_from([0.001, 0.5, 0.97]), draw=draws)
def test_masked_rows_are_sampled_the_same_as_bfloat16_and_float32(
    kernel: Any, seed: int, vocab: int, share: float, draw: Draw
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (4.0 * torch.randn(1, vocab, generator=generator)).bfloat16()
    allowed = torch.rand(1, vocab, generator=generator) < share
    allowed[0, seed % vocab] = True
    scores = logits.masked_fill(~allowed, -torch.inf)
    (token_id,) = kernel.sample(scores, [draw])
    assert allowed[0, token_id]
    assert kernel.sample(scores.float(), [draw]) == [token_id]
