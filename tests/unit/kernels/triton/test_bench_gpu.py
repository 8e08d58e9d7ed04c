"""The cases of the GPU benchmark on a CPU, interpreted and with tiny shapes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import bench_gpu, registry
from support.triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)
TINY = bench_gpu.BenchModel(hidden_size=48, intermediate_size=80, heads=4, kv_heads=2, head_dim=16, vocabulary=96)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


@torch.inference_mode()
def test_every_case_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = registry.with_triton(batch_invariant=False)
    assert isinstance(kernels, registry.Kernels)
    monkeypatch.setattr(registry, "choose", lambda *args: kernels)
    cases = [
        *bench_gpu.linear_cases(TINY, (1, 3, 4), random),
        *bench_gpu.row_cases(TINY, (1, 20), random),
        *bench_gpu.expert_cases(bench_gpu.BenchExperts(4, 2, 48, 24), (5,), random),
        *bench_gpu.attention_cases(TINY, ((2, 1, 20), (1, 16, 16), (2, 3, 20)), random),
    ]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) > 40
    results = {case.name: case.make()() for case in cases}
    assert all(case.num_bytes > 0 for case in cases)
    assert {name for name in names if re.match("torch (rms|add|layer|rope|silu|gelu|attention)", name)} == {
        f"torch {name}"
        for name in names
        if not name.startswith("torch ") and re.match("[a-z_]+ bf16|attention", name)
        if not re.match("qkv|output|up|down|head|.*2 x 3 of 20", name)
    }
    for name, theirs in results.items():
        if re.match("torch (rms|layer|rope|silu|gelu)", name):
            assert results[name.removeprefix("torch ")].shape == theirs.shape  # type: ignore[attr-defined]
    grouped = results["torch grouped experts 2 of 4, 48 x 24 bf16, 5 rows"]
    torch.testing.assert_close(results["experts 2 of 4, 48 x 24 bf16, 5 rows"], grouped, rtol=2**-6, atol=2.0)


@pytest.mark.slow
def test_sampling_is_timed() -> None:
    times = bench_gpu.sampling_times(random, 50, (1, 64))
    kinds = 4  # three ways to sample, and masks
    assert len(times) == 2 * kinds and all(timing.us > 0 for timing in times.values())


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    bench_gpu.report({"rms_norm": bench_gpu.Timing(2.0, 4_000_000, 8e6)}, 4000.0, 8000.0)
    table_row, json_line = capsys.readouterr().out.splitlines()
    assert re.search(r"rms_norm +2\.0 us +2000\.0 GB/s +50% +4000 GFLOP/s +50%", table_row)
    assert json_line == '{"rms_norm": 2.0}'
