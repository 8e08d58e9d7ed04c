"""What really lies in memory: the bytes of a decoder's tensors, and the most that torch allocates during a call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def mapped_checkpoints() -> list[range]:
    """Addresses at which files of checkpoints lie mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if ".safetensors" in line]
    return [range(int(first, 16), int(end, 16)) for first, end in bounds]


def weight_bytes(decoder: object) -> int:
    """Of all tensors that hang on a decoder, each storage counted once; without the frequencies of its ropes."""
    files = mapped_checkpoints()
    sizes: dict[int, int] = {}
    seen = {id(getattr(decoder, "_ropes", None))}
    todo = [decoder]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, ModuleType | type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout is torch._mkldnn:
                sizes[id(item)] = torch.ops.mkldnn._nbytes(item)
            else:
                storage = item.untyped_storage()
                mapped = any(storage.data_ptr() in file for file in files)  # only what is used takes memory
                sizes[storage._cdata] = item.nbytes if mapped else storage.nbytes()
        elif isinstance(item, FunctionType):  # not its globals
            todo += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            todo += gc.get_referents(item)
    return sum(sizes.values())


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator gives out during a call and has not got back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
