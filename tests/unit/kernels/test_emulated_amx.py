"""The loops for AMX, with its instructions emulated, on processors with AVX-512 that lack it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from reference import linear as definition
from reference import linear_int8 as definition_int8
from serve_llm.kernels.cpu.library import VARIANTS, Library
from serve_llm.kernels.cpu.linear import Packer

ROOT = Path(__file__).parents[3]
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mavx512bf16 -mavx512vnni".split()
PROCESSOR = Path("/proc/cpuinfo")
SOURCES = ("linear.cpp", "pool.cpp", "multiply.cpp", "tables.cpp")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        not PROCESSOR.exists() or "avx512_bf16" not in PROCESSOR.read_text(), reason="needs AVX512-BF16"
    ),
]


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Packer:
    path = tmp_path_factory.mktemp("amx") / "amx.so"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", *AVX512]
    names = ["-DVARIANT=amx", "-DHAVE_AMX", "-include", str(ROOT / "tests/support/emulated_amx.h")]
    sources = [str(ROOT / "kernels/cpu" / name) for name in SOURCES]
    subprocess.run(["g++", *options, *names, *sources, "-o", str(path)], check=True, timeout=300)
    compiled = ctypes.CDLL(str(path))

    def sum_int8(weight: int, stride: int, outputs: int, inputs: int, sums: int, threads: int) -> None:
        rows = [(ctypes.c_int8 * inputs).from_address(weight + row * stride) for row in range(outputs)]
        (ctypes.c_int32 * outputs).from_address(sums)[:] = [sum(row) for row in rows]

    def function(name: str, *_: type) -> Callable[..., None]:
        return {"sum_int8": sum_int8}[name]

    library = SimpleNamespace(compiled=compiled, variant_index=VARIANTS.index("amx"), function=function, _recorder=None)
    library.shared_function = lambda *arguments: Library.shared_function(cast(Any, library), *arguments)
    return Packer(cast(Any, library))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(97, 53), (64, 1040), (84, 19), (7, 1), (130, 300)])
def test_bfloat16(packer: Packer, shape: tuple[int, int]) -> None:
    weight, x = random(*shape, seed=0), random(300, shape[1], seed=1)
    layer = packer.pack(weight)
    whole = layer(x)
    exact = definition.pack(weight.double(), None)(x.double())
    scale = weight.double().norm(dim=1) * x.double().norm(dim=1, keepdim=True) + exact.abs()
    assert ((whole - exact).abs() / scale).max() < 4e-3
    for rows in (1, 7, 16, 17, 32, 33, 63, 300):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_int8(packer: Packer) -> None:
    weight = torch.randint(-127, 128, (97, 150), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = random(97, 1, seed=2).float().abs()
    x = random(70, 150, seed=1)
    found = packer.pack_int8(weight, scale)(x)
    expected = definition_int8.pack_int8(weight, scale, None)(x)
    error = (found.float() - expected.float()) / expected.float().abs().amax(1, keepdim=True)
    assert error.abs().max() < 8e-3
