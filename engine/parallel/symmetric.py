"""All-reduce of small tensors through torch's symmetric memory, which the GPUs of one host map from each other. At the
sizes of decode steps, launching NCCL's all-reduce costs more than the sum.

    up to ONE_SHOT_BYTES      one kernel: every rank reads and adds the tensors of all others
    up to `buffer_bytes`      each rank adds one part and writes it to all ranks; an NVSwitch may do both
    otherwise                 NCCL

Not tested on GPUs yet. It relies on these properties of torch 2.11 to 2.13, found in its sources:

- an operator finds its group by the name of a registered ProcessGroup and takes ranks and store from it; no default
  group is needed. (With `set_group_info`, each call of an operator would use the store, in torch 2.13 or soon after.)
- the kernels add in rank order, whatever the size, but in the tensor's dtype: with more than two ranks in bfloat16 each
  addition is rounded. The switch adds in float32, in another order.
- an operator returns when no other rank still reads or writes this rank's buffer, so that the next one may fill it.
  It neither allocates nor waits on the host, so it can be captured in a graph.
- there is no timeout: if a rank is lost, the others spin on the GPU until the engine ends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store

from serve_llm.common.errors import OptionError
from serve_llm.engine.parallel.groups import ProcessGroup
from serve_llm.engine.parallel.torch_group import gather_values

logger = logging.getLogger(__name__)

ONE_SHOT_BYTES = 256 << 10  # the sizes at which torch itself changes kernels
SYMMETRIC_BYTES = 10 << 20
LARGE_GROUP_BYTES = 64 << 20  # for 8 ranks, where parts are small
ALIGNMENT = 16  # bytes that a GPU thread loads at a time
TIMED_BYTES = (64 << 10, 1 << 20, 8 << 20)  # a decode step of some sequences, of many, and a prompt's chunk
DTYPES = (torch.bfloat16, torch.float32)  # supported by the operators


class SymmetricMemory(Protocol):
    """A buffer that all ranks of a group can read and write. part: a view of its first elements, alike on all ranks."""

    @property
    def buffer(self) -> Tensor:
        """(`buffer_bytes`,) uint8."""

    def one_shot(self, part: Tensor, x: Tensor) -> None:
        """x becomes the sum of all ranks' x. part: like x."""

    def in_place(self, part: Tensor) -> None:
        """part becomes the sum of all ranks' part."""


class SymmetricGroup:
    """A `ProcessGroup` that sums small tensors in symmetric memory and leaves all else to another group of the same
    ranks. The choice depends on shape and dtype only, so all ranks choose alike."""

    def __init__(self, group: ProcessGroup, memory: SymmetricMemory) -> None:
        self._group = group
        self._memory = memory
        self.max_bytes = memory.buffer.nbytes  # the largest sum that fits in symmetric memory
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The same bits on every rank, but not added in float32: see the module."""
        num_bytes = x.nbytes
        if num_bytes > self.max_bytes or num_bytes % ALIGNMENT or x.dtype not in DTYPES:
            return self._group.all_reduce(x)
        if num_bytes == 0:
            return x
        part = self._memory.buffer[:num_bytes].view(x.dtype).view(x.shape)
        if num_bytes > ONE_SHOT_BYTES:
            part.copy_(x)
            self._memory.in_place(part)
            return x.copy_(part)
        if x.storage_offset() * x.element_size() % ALIGNMENT:
            x = x.clone()
        self._memory.one_shot(part, x)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._group.all_gather(x)


@dataclass(frozen=True)
class TorchMemory:
    """See `SymmetricMemory`. Made by `map_buffers`."""

    buffer: Tensor
    name: str
    group: object  # the ProcessGroup, kept alive: the registry of names holds no reference
    by_switch: bool

    def one_shot(self, part: Tensor, x: Tensor) -> None:
        # x may be input and output: a thread reads its elements of x before it writes their sum.
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(part, x, "sum", self.name, x)

    def in_place(self, part: Tensor) -> None:
        if self.by_switch:
            torch.ops.symm_mem.multimem_all_reduce_(part, "sum", self.name)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self.name)


def buffer_bytes(size: int) -> int:
    """The largest sum of a group of `size` ranks that goes through symmetric memory."""
    return LARGE_GROUP_BYTES if size == 8 else SYMMETRIC_BYTES


def build_fastest_group(
    store: Store, name: str, group: ProcessGroup, hosts: Sequence[str], device: torch.device
) -> ProcessGroup:
    """Return a group with symmetric memory if all ranks find its sums exact and, on the whole, faster; otherwise
    `group`.

    Sums of TIMED_BYTES are timed both ways. Symmetric memory is used for sizes below the first one at which it is not
    faster. Arguments as for `build_symmetric_group`. All ranks decide alike. Logs what was chosen and why.
    """

    def exchange(key: str, value: str) -> list[str]:
        return gather_values(store, f"{name}, {key}", group.rank, group.size, value)

    symmetric: SymmetricGroup | None = None
    try:
        symmetric = build_symmetric_group(store, name, group, hosts, device)
        problem = ""
    except OptionError as error:
        problem = str(error)
    problems = exchange("mapped", problem)
    if symmetric is not None and not any(problems):
        problems = exchange("sums", find_wrong_sums(symmetric, device))
        if not any(problems):
            max_bytes, times = _compare_times(symmetric, group, device, exchange)
            if max_bytes:
                symmetric.max_bytes = max_bytes
                logger.info("All-reduce by symmetric memory up to %d KiB: %s", max_bytes >> 10, times)
                return symmetric
            problems = [f"it is not faster ({times})"]
    logger.info("All-reduce by NCCL, not symmetric memory: %s", next(filter(None, problems)))
    return group


def _compare_times(
    symmetric: SymmetricGroup, group: ProcessGroup, device: torch.device, exchange: Callable[[str, str], list[str]]
) -> tuple[int, str]:
    """Return the largest sum for symmetric memory, in bytes, and a description of the times. All ranks get the same
    result, because exchange(key, value) returns the values of all."""
    max_bytes = symmetric.max_bytes
    words = []
    for num_bytes in TIMED_BYTES:
        micros = [measure_micros(one, num_bytes, device) for one in (symmetric, group)]
        pairs = [pair.split() for pair in exchange(f"{num_bytes} bytes", " ".join(map(str, micros)))]
        ours, theirs = (sum(float(pair[index]) for pair in pairs) / len(pairs) for index in (0, 1))
        words.append(f"{num_bytes >> 10} KiB in {ours:.1f} us, by NCCL in {theirs:.1f} us")
        if ours >= theirs:
            max_bytes = min(max_bytes, num_bytes // 2)
    is_never_faster = max_bytes < TIMED_BYTES[0]
    return 0 if is_never_faster else max_bytes, "; ".join(words)


def find_wrong_sums(group: ProcessGroup, device: torch.device) -> str:
    """Sum small integers, which are exact in any order, both ways and in both dtypes. Returns a description of errors,
    or ""."""
    found = []  # all ranks run all sums, whatever the results
    for dtype in DTYPES:
        for num_bytes in (ALIGNMENT, ONE_SHOT_BYTES, ONE_SHOT_BYTES + ALIGNMENT, 4 * ONE_SHOT_BYTES):
            positions = torch.arange(num_bytes // dtype.itemsize, device=device)
            total = group.all_reduce(((positions + group.rank) % 3).to(dtype))
            expected = sum(((positions + rank) % 3 for rank in range(group.size)), torch.zeros_like(positions))
            if wrong := int((total != expected.to(dtype)).sum()):
                found.append(f"{wrong} of {len(positions)} sums in {dtype} are wrong on rank {group.rank}")
    return found[0] if found else ""


def measure_micros(group: ProcessGroup, num_bytes: int, device: torch.device, repeats: int = 50) -> float:
    """Microseconds of an all-reduce of `num_bytes` bytes, the mean of `repeats` after a few to warm up."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    for _ in range(5):
        group.all_reduce(x).sum().item()  # also waits for a GPU
    began = time.perf_counter()
    for _ in range(repeats):
        group.all_reduce(x)
    x.sum().item()
    return (time.perf_counter() - began) / repeats * 1e6


def build_symmetric_group(
    store: Store, name: str, group: ProcessGroup, hosts: Sequence[str], device: torch.device
) -> SymmetricGroup:
    """Build the group. All ranks call this, each with a GPU of its own; it waits for them.

    store: shared by all ranks. name: of the group, unique in the store. hosts: host id of each rank. device: with its
    index. Raises OptionError if the GPUs cannot map each other's memory.
    """
    if len(set(hosts)) > 1:
        raise OptionError(
            f"--all-reduce: symmetric needs each tensor-parallel group on one host, not on {len(set(hosts))}; use "
            "nccl, or --pipeline-parallel-size across hosts"
        )
    return SymmetricGroup(group, map_buffers(store, f"{name}, symmetric memory", group.rank, group.size, device))


def map_buffers(store: Store, name: str, rank: int, size: int, device: torch.device) -> TorchMemory:
    """Map a buffer of every rank; see `build_symmetric_group`."""
    torchs: Any = _distributed_c10d  # its stubs differ between versions
    group = torchs.ProcessGroup(PrefixStore(name, store), rank, size)
    group._set_group_name(name)
    torchs._register_process_group(name, group)
    try:
        buffer = torchs._SymmetricMemory.empty_strided_p2p((buffer_bytes(size),), (1,), torch.uint8, device)
        memory = torchs._SymmetricMemory.rendezvous(buffer, name)
    except RuntimeError as error:
        raise OptionError(
            f"--all-reduce: symmetric: the GPUs of this host cannot map each other's memory ({error}); use nccl"
        ) from error
    return TorchMemory(buffer, name, group, by_switch=memory.multicast_ptr != 0)
