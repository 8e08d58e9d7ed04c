"""The noise is uniform, its streams are independent, and it never changes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.engine.sampling.noise import uniform

words = st.integers(0, 2**64 - 1)


@given(words, st.integers(0, 10**6), st.integers(0, 10**6))
def test_range(seed: int, choice: int, position: int) -> None:
    (number,) = uniform([seed], [choice], [position]).tolist()
    assert 0.0 <= number < 1.0 and [number, number] == uniform([seed] * 2, [choice] * 2, [position] * 2).tolist()
    assert (number * 2**53).is_integer()


def test_is_the_published_generator() -> None:
    """SplitMix64's first outputs from state 1234567, as Vigna's reference code prints them, passed through our
    finaliser."""
    from serve_llm.engine.sampling.noise import _GAMMA, _mix

    outputs = _mix(np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * _GAMMA)
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ((0, 0, 0), 0.13870941014555427),
        ((0, 0, 1), 0.9711020828012883),
        ((0, 1, 0), 0.18383979100743952),
        ((1, 0, 0), 0.6935121390102292),
        ((2**64 - 1, 3, 99), 0.7053761217450263),
    ],
)
def test_never_changes(arguments: tuple[int, int, int], number: float) -> None:
    """A change here changes the output of every seed: streams continued after an upgrade would break."""
    assert uniform(*([argument] for argument in arguments)).tolist() == [number]


AXES = {
    "position": [(7, 0, n) for n in range(40_000)],
    "seed": [(n, 0, 0) for n in range(40_000)],
    "high seed bits": [(n << 40, 0, 0) for n in range(40_000)],
    "choice": [(7, n, 0) for n in range(40_000)],
    "all": list(itertools.product(range(40), range(40), range(25))),
}


@pytest.mark.parametrize("axis", AXES)
def test_even_and_unrelated_to_the_neighbour(axis: str) -> None:
    numbers = uniform(*zip(*AXES[axis], strict=True))
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - 400) ** 2 / 400).sum() < 148.2  # chi-square, 99.9 % at 99 degrees
    pairs = (numbers[:-1] * 10).astype(int) * 10 + (numbers[1:] * 10).astype(int)
    wanted = len(pairs) / 100
    assert ((np.bincount(pairs, minlength=100) - wanted) ** 2 / wanted).sum() < 148.2
