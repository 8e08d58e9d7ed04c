"""Recorded calls (`kernels.cpu.call_recorder`) compute from the inputs' memory into the same results."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.call_recorder import BufferPool, CallRecorder
from serve_llm.kernels.cpu.rows import RowKernels

PATH = library.find()


def record(compute: Callable[[], Tensor], pool: BufferPool | None = None) -> tuple[Tensor, CallRecorder]:
    with torch.inference_mode(), CallRecorder(pool or BufferPool()) as recorder:
        result = compute()
    return result, recorder


def replay(recorder: CallRecorder) -> None:
    with torch.inference_mode():
        recorder.replay()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.t().contiguous().mul_(2).view(-1),
        lambda x: torch.empty_like(x).copy_(x).sub_(3),
        lambda x: torch.cat(x.relu().chunk(2, 1)).sum(0, keepdim=True),
        lambda x: x.sort(1)[0][:, 1:],
        lambda x: torch.where(x < 0, torch.zeros_like(x), x.double().cos().float()),
        lambda x: x.index_select(0, torch.tensor([2, 0])),
        lambda x: torch.nn.functional.pad(x, (0, 2)).new_zeros(3).add_(x[0, 0]),
    ],
)
def test_a_replay_computes_from_new_inputs(compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    result, recorder = record(lambda: compute(x))
    assert torch.equal(result, compute(x))
    for _ in range(2):
        x.normal_()
        replay(recorder)
        assert torch.equal(result, compute(x))


OPERATIONS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {  # whether a kernel takes its place
    "embedding": (True, lambda x: torch.nn.functional.embedding(torch.tensor([2, 0, 2, 4]), x)),
    "rows": (True, lambda x: x[torch.tensor([4, 1])]),
    "rows from the end": (True, lambda x: x[torch.tensor([-1, 0, -5])]),
    "no rows": (False, lambda x: x[torch.tensor([], dtype=torch.int64)]),
    "rows without numbers": (False, lambda x: x[:, :0][torch.tensor([1, 0])]),
    "sum of no numbers": (False, lambda x: x[:, :0] + x[:, 1:1]),
    "sum": (True, lambda x: x + x.flip(0)),
    "sum with one row": (True, lambda x: x + x[3]),
    "scaled sum": (False, lambda x: torch.add(x, x.flip(0), alpha=2)),
    "sum with a number": (False, lambda x: x + 1),
    "sum with a column": (False, lambda x: x + x[:, :1]),
    "sum with another type": (False, lambda x: x + x.double()),
    "sum with columns": (False, lambda x: x + x.flip(0).t().contiguous().t()),
    "columns": (False, lambda x: x[:, torch.tensor([3, 1])]),
    "cells": (False, lambda x: x[torch.tensor([3, 1]), torch.tensor([3, 1])]),
    "mask": (False, lambda x: torch.where(x[:, 0] > 0, x[:, 1], x[:, 2])),
    "rows of rows": (False, lambda x: x[torch.tensor([[3, 1], [0, 0]])]),
}


@pytest.mark.skipif(PATH is None, reason="no C++ compiler at installation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_take_the_place_of_operations(name: str, dtype: torch.dtype) -> None:
    """With the same bits: numbers of all sizes, among them those that are rounded and subnormal ones."""
    assert PATH is not None
    is_replaced, compute = OPERATIONS[name]
    generator = torch.Generator().manual_seed(1)
    scales = 2.0 ** torch.randint(-135, 100, (5, 700), generator=generator)
    x = (torch.randn((5, 700), generator=generator) * scales).to(dtype)
    expected = compute(x)
    with torch.inference_mode(), library.Library(PATH).record(BufferPool()) as recorder:
        result = compute(x)
    kernels = [call for call, _ in recorder._calls if "serve_llm" in getattr(call, "__name__", "")]
    assert bool(kernels) == is_replaced
    with torch.inference_mode():
        result.fill_(7)
    replay(recorder)
    assert torch.equal(result, expected)


def fill(recorder: CallRecorder, tensor: Tensor, source: Tensor, added: float) -> Tensor:
    """Call a kernel that gets addresses. Returns `tensor`."""

    def add(to: int, read: int, count: int) -> None:
        numbers = (ctypes.c_float * count).from_address(read)
        (ctypes.c_float * count).from_address(to)[:] = [number + added for number in numbers]

    arguments = (tensor.data_ptr(), source.data_ptr(), source.numel())
    add(*arguments)
    recorder.add(add, arguments)
    return tensor


def test_results_that_nobody_holds_give_their_memory_to_later_ones() -> None:
    pool = BufferPool()
    x = torch.zeros(2, 3)
    with torch.inference_mode(), CallRecorder(pool) as recorder:
        total = x
        for _ in range(10):
            total = fill(recorder, torch.empty_like(total), total, 1.0)
        half = total[1:]
        del total
        other = fill(recorder, torch.empty(1, 3), half, 5.0)
        constant = fill(recorder, torch.empty(3), torch.tensor([1.0, 2.0, 3.0]), 1.0)
    assert len(pool._buffers) == 3, "two in turns, and one for the last result"
    x.fill_(2)
    replay(recorder)
    assert half.eq(12).all() and other.eq(17).all() and constant.tolist() == [2, 3, 4]


def test_the_pool_does_not_grow_with_the_layers_or_the_recordings() -> None:
    x = torch.randn(6, 8)
    pool = BufferPool()

    def compute(layers: int) -> Tensor:
        hidden = x
        for _ in range(layers):
            best, order = hidden.topk(4)
            scattered = torch.empty(6, 8).zero_()
            scattered[:, :4] = best.softmax(-1) + order.float()
            hidden = torch.cat((scattered[:, 4:], scattered[:, :4]), 1).mul_(0.5) + hidden
        return hidden

    _, first = record(lambda: compute(1), pool)
    del _
    num_buffers = len(pool._buffers)
    result, recorder = record(lambda: compute(12), pool)
    assert len(pool._buffers) <= num_buffers + 3
    x.normal_()
    replay(first)
    replay(recorder)
    assert torch.equal(result, compute(12))


def test_a_step_that_reads_a_value_back_is_not_recorded() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="reads back a value"):
        record(lambda: x * x.sum().item())


def test_kernels_get_copies_of_their_structures() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_int))

    pair = Pair(1, 2)
    seen: list[tuple[int, int, int]] = []

    def kernel(reference: object, number: int) -> None:
        structure = reference._obj  # type: ignore[attr-defined]
        seen.append((structure.first, structure.second, number))

    recorder = CallRecorder(BufferPool())
    recorder.add(kernel, (ctypes.byref(pair), 5))
    pair.first = 9
    recorder.replay()
    assert seen == [(1, 2, 5)]


@pytest.mark.skipif(PATH is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("can_join", [True, False])
def test_compiled_kernels_are_repeated_with_all_their_arguments(
    dtype: torch.dtype, can_join: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take up to 22 integers and addresses, and floats between them; torch's operations keep their place."""
    assert PATH is not None
    compiled = library.Library(PATH)
    if not can_join:
        monkeypatch.setattr(compiled.compiled, "serve_llm_can_repeat", lambda: 0)
    rows = RowKernels(compiled)
    x = torch.randn(3, 96, dtype=dtype)
    weight = torch.randn(96, dtype=dtype)
    angles = (torch.randn(3, 8), torch.randn(3, 8))
    slots = torch.tensor([5, 0, 9])

    def compute() -> tuple[Tensor, Tensor]:
        cache = torch.zeros(3, 2, 1, 4, 16, dtype=dtype)
        total, normed = rows.add_rms_norm(x, rows.rms_norm(x, weight, 0.25), weight, 0.5)
        query = rows.rope_and_cache(normed, 4, None, angles, cache, slots)
        return rows.silu_and_mul(query.view(3, 64).neg()), torch.cat((cache.view(-1), total.view(-1)))

    with torch.inference_mode(), compiled.record(BufferPool()) as recorder:
        results = compute()
    for _ in range(2):
        x.normal_()
        slots.copy_(slots.roll(1))
        replay(recorder)
        assert all(torch.equal(*pair) for pair in zip(results, compute(), strict=True))


def test_a_kernel_with_more_arguments_than_the_form_has_is_called_by_itself() -> None:
    kernel = ctypes.CFUNCTYPE(None, *(ctypes.c_int,) * 30)
    given = []

    def repeat(calls: object, count: int) -> None:
        raise AssertionError("not joined")

    @kernel
    def collect(*arguments: int) -> None:
        given.append(sum(arguments))

    with torch.inference_mode(), CallRecorder(BufferPool(), repeat) as recorder:
        recorder.add(collect, range(30))
    recorder.replay()
    assert given == [sum(range(30))]


def test_recording_does_not_import_the_compiler_of_torch() -> None:
    """Its import takes a second, in which all streams would wait."""
    code = (
        "import sys, torch; from serve_llm.kernels.cpu.call_recorder import BufferPool, CallRecorder\n"
        "with CallRecorder(BufferPool()): torch.ones(3) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
