"""Out-of-memory errors get the class that decides how they are handled."""

from __future__ import annotations

import re

import pytest
import torch

from serve_llm.common.errors import CapacityError, EngineError
from serve_llm.engine.worker import kv_cache, oom

GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 138.6 GiB memory in use. Of the allocated memory ..."
)
GRAPH = RuntimeError(
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/ for more.\nCUDA "
    "kernel errors might be asynchronously reported at some other API call. non-PyTorch"
)
KERNEL, CUBLAS = (
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


@pytest.mark.parametrize(
    "error", [GPU, GRAPH, KERNEL, CUBLAS, MemoryError(), MemoryError("Unable to allocate 1 TiB")], ids=str
)
def test_a_shortage_at_start_is_a_matter_of_capacity_and_one_in_a_step_a_failure(error: Exception) -> None:
    with pytest.raises(CapacityError, match=r"^out of memory while loading: .+; lower --kv-cache-memory"):
        with oom.translate_oom(CapacityError, "while loading"):
            raise error
    with pytest.raises(EngineError, match=r"^out of memory in a step: .+; lower --max-num-batched-tokens") as caught:
        with oom.translate_oom(EngineError, "in a step"):
            raise error
    assert "non-PyTorch" not in str(caught.value)


def test_what_torch_really_raises_on_a_cpu() -> None:
    with pytest.raises(CapacityError, match="can't allocate memory"), oom.translate_oom(CapacityError, "while trying"):
        torch.empty(2**50)


def test_other_errors_stay_what_they_are() -> None:
    for guard in (oom.translate_oom(CapacityError, "while loading"), oom.translate_oom(EngineError, "in a step")):
        with pytest.raises(RuntimeError, match=r"^shapes") as caught, guard:
            raise RuntimeError("shapes do not fit")
        assert type(caught.value) is RuntimeError


def test_what_is_asked_for_must_be_free() -> None:
    kv_cache.check_free(2**30, 2, free=2**31)
    with pytest.raises(CapacityError, match=re.escape("1.00 GiB for each of 3 ranks, but only 2.00 GiB")):
        kv_cache.check_free(2**30, 3, free=2**31)
    kv_cache.check_ranks(8, free=2**30)
    with pytest.raises(CapacityError, match=r"^9 ranks on this host take at least"):
        kv_cache.check_ranks(9, free=2**30)
