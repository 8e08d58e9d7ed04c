"""Whether `plan` knows the layout that the kernels choose on this machine."""

from __future__ import annotations

import pytest

from serve_llm.cli.plan import processor
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.linear import Packer

COMPILED = library.find()


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
def test_weights_are_compressed_where_the_kernels_do() -> None:
    assert COMPILED is not None
    processor.compresses_bfloat16.cache_clear()
    assert processor.compresses_bfloat16() == Packer(Library(COMPILED)).compresses


@pytest.mark.parametrize(
    ("more", "limit", "expected"),
    [
        ((), "", True),
        (("avx512_bf16", "avx512_vnni"), "", True),
        (processor.AMX, "", False),
        (processor.AMX, "AVX512_CORE_BF16", True),
        ((), "AVX2", False),
    ],
)
def test_flags_and_limits(more: tuple[str, ...], limit: str, expected: bool) -> None:
    assert processor.can_compress(processor.AVX512 | set(more), limit) == expected
    assert not processor.can_compress({"avx2", "fma", *more}, limit)


def test_limits_are_those_of_the_kernels() -> None:
    assert processor.LIMIT_VARIABLE == library.LIMIT_VARIABLE
    for limit, fastest in library.LIMITS.items():
        assert (limit in processor.WITHOUT_AVX512) == (fastest in ("baseline", "avx2"))
        assert (limit in processor.WITHOUT_AMX) == (fastest in ("avx512", "avx512_bf16"))
