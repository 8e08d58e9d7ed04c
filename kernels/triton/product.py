"""Matrix products inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter takes bfloat16 for integers in tl.dot (seen in 3.6 and 3.9) and gives wrong numbers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total):
    """total + left @ right, with float32 sums: (m, k) @ (k, n), m at least 16. Products of float32 are exact ones."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
