"""ALiBi (arXiv:2108.12409): a bias on the scores that grows linearly with the distance encodes positions."""

from __future__ import annotations

MAX_HEADS = 65536  # each head is a list entry before any weight is read


def compute_slopes(num_heads: int, largest_exponent: float = 8.0) -> tuple[float, ...]:
    """One slope per head: a geometric sequence that ends with 2 ** -largest_exponent.

    If the number of heads is not a power of two, the sequence of the next power of two is used: first every second
    slope, then as many of the others as are needed, in order.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = tuple(2.0 ** (-largest_exponent * (index + 1) / count) for index in range(count))
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]
