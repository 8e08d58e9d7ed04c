"""What this machine's processor decides about the layout of weights. No torch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels/cpu"
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
AMX = {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"}  # besides AVX512
LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"  # as `kernels.cpu.library` reads it
WITHOUT_AVX512 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}
WITHOUT_AMX = {"AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}


def can_compress(flags: set[str], limit: str) -> bool:
    """Return whether the compiled kernels hold bfloat16 weights in 12 bits: with AVX-512 and without AMX.

    flags: Linux's names of processor features. limit: the value of LIMIT_VARIABLE."""
    if not flags >= AVX512 or limit in WITHOUT_AVX512:
        return False
    return not flags >= AMX or limit in WITHOUT_AMX


@cache
def compresses_bfloat16() -> bool:
    """Return whether the compiled kernels hold bfloat16 weights in 12 bits on this machine."""
    if not any(KERNELS.glob("compiled.*")):  # torch's operations take plain weights
        return False
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return can_compress(flags, os.environ.get(LIMIT_VARIABLE, "").upper())
