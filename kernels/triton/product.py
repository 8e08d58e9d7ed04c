"""Matrix products inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter treats bfloat16 as integers in tl.dot (seen in 3.6 and 3.9) and returns wrong results.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total):
    """Return total + left @ right in float32: (m, k) @ (k, n), m at least 16. total: None for 0.

    float32 inputs are not rounded to TF32.
    """
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
