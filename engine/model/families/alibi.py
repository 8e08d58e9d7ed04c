"""ALiBi (arXiv:2108.12409): positions as a bias of the scores that grows linearly with the distance."""

from __future__ import annotations

MOST_HEADS = 65536  # each is an entry in a list before a weight is read


def compute_slopes(num_heads: int, largest_exponent: float = 8.0) -> tuple[float, ...]:
    """One slope per head: a geometric sequence that ends with 2 ** -largest_exponent.

    For a number of heads that is no power of two, the sequence of the next power of two is taken: every second slope,
    then as many of the others as are needed, from the first on.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = tuple(2.0 ** (-largest_exponent * (index + 1) / count) for index in range(count))
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]
