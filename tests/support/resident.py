"""Actual memory use: the bytes of a decoder's tensors, and the peak of torch's allocations during a call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from serve_llm.kernels.held_tensors import find_tensors


def mapped_checkpoints() -> list[range]:
    """Return the addresses at which checkpoint files are mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if ".safetensors" in line]
    return [range(int(first, 16), int(end, 16)) for first, end in bounds]


def weight_bytes(decoder: object) -> int:
    """Count the bytes of all tensors of a decoder, each storage once, without rope frequencies."""
    files = mapped_checkpoints()
    sizes: dict[int, int] = {}
    for tensor in find_tensors(decoder, without=[getattr(decoder, "_ropes", None)]):
        if tensor.is_mkldnn:
            sizes[id(tensor)] = torch.ops.mkldnn._nbytes(tensor)
        else:
            storage = tensor.untyped_storage()
            mapped = any(storage.data_ptr() in file for file in files)  # only used parts take memory
            sizes[storage._cdata] = tensor.nbytes if mapped else storage.nbytes()
    return sum(sizes.values())


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by torch's CPU allocator during a call. Garbage of earlier calls that were
    measured is not collected meanwhile, because it would count as freed memory."""
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
    finally:
        gc.enable()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
