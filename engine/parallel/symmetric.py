"""All-reduce of small tensors through memory that the GPUs of one host map from each other (torch's symmetric memory),
in place of NCCL's, whose start costs more than the sum at the sizes of decode steps.

    up to ONE_SHOT_BYTES      one kernel: every rank reads all others' numbers and adds them
    up to SYMMETRIC_BYTES     each rank adds one share and hands it to all; where the switch can add, it does both
    larger, and all others    NCCL

Has not run on GPUs yet. What it relies on was read in torch's sources, 2.11 to 2.13:

- an operator finds its group by the name under which a ProcessGroup is registered, of which it takes ranks and store;
  no default group is needed. (Group information given to `set_group_info` as well makes each call of an operator meet
  the other ranks in the store, in torch 2.13 or soon after.)
- the first two add in rank order, whatever the size, but in the tensor's dtype: of more than two ranks in bfloat16 each
  addition is rounded. The switch adds in float32, in an order of its own.
- an operator ends when no other rank reads or writes this one's buffer any more, so that the next may fill it. Nothing
  is allocated and nothing waits on the host, so a call can be captured.
- they know no timeout: with a rank lost, others spin on the GPU until whoever watches over them ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store

from serve_llm.engine.errors import OptionError
from serve_llm.engine.parallel.comm import Group

ONE_SHOT_BYTES = 256 << 10  # the sizes from which torch's own choice of a kernel goes on to the next one
SYMMETRIC_BYTES = 10 << 20
ALIGNMENT = 16  # bytes that a thread takes at a time
DTYPES = (torch.bfloat16, torch.float32)  # that the operators add


class Memory(Protocol):
    """A buffer that all ranks of a group can read and write. `part`: its first numbers, the same on all ranks."""

    @property
    def buffer(self) -> Tensor:
        """(SYMMETRIC_BYTES,) uint8."""

    def one_shot(self, part: Tensor, x: Tensor) -> None:
        """x becomes the sum of all ranks' x. part: like x."""

    def in_place(self, part: Tensor) -> None:
        """part becomes the sum of all ranks' part."""


class SymmetricGroup:
    """A `comm.Group` over another, of the same ranks, that small sums do not pass through. Which way a tensor takes
    follows from its shape and dtype, so it is the same on all ranks."""

    def __init__(self, group: Group, memory: Memory) -> None:
        self._group, self._memory = group, memory
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The same bits on every rank, but not in float32 throughout: see above."""
        num_bytes = x.nbytes
        if num_bytes > SYMMETRIC_BYTES or num_bytes % ALIGNMENT or x.dtype not in DTYPES:
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
    """See `Memory`. Made by `join`."""

    buffer: Tensor
    name: str
    group: object  # a ProcessGroup: the registry of names keeps none in being
    by_switch: bool

    def one_shot(self, part: Tensor, x: Tensor) -> None:
        # A thread has read its numbers of x before it writes the sum of the same places.
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(part, x, "sum", self.name, x)

    def in_place(self, part: Tensor) -> None:
        if self.by_switch:
            torch.ops.symm_mem.multimem_all_reduce_(part, "sum", self.name)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self.name)


def symmetric_group(
    store: Store, name: str, group: Group, hosts: Sequence[str], device: torch.device
) -> SymmetricGroup:
    """Called by all ranks of the group, each with a GPU to itself; waits for them.

    store: of all. name: of the group, once per store. hosts: of each rank. device: with its index. Raises OptionError
    where the GPUs cannot map each other's memory.
    """
    if len(set(hosts)) > 1:
        raise OptionError(
            f"--all-reduce: symmetric needs each tensor-parallel group on one host, not on {len(set(hosts))}; take "
            "nccl, or --pipeline-parallel-size across hosts"
        )
    return SymmetricGroup(group, join(store, f"{name}, symmetric memory", group.rank, group.size, device))


def join(store: Store, name: str, rank: int, size: int, device: torch.device) -> TorchMemory:
    """Map a buffer of every rank; see `symmetric_group`."""
    torchs: Any = _distributed_c10d  # whose stubs want names to be of a type that not all versions have
    group = torchs.ProcessGroup(PrefixStore(name, store), rank, size)
    group._set_group_name(name)
    torchs._register_process_group(name, group)
    try:
        buffer = torchs._SymmetricMemory.empty_strided_p2p((SYMMETRIC_BYTES,), (1,), torch.uint8, device)
        memory = torchs._SymmetricMemory.rendezvous(buffer, name)
    except RuntimeError as error:
        raise OptionError(
            f"--all-reduce: symmetric: the GPUs of this host cannot map each other's memory ({error}); take nccl"
        ) from error
    return TorchMemory(buffer, name, group, by_switch=memory.multicast_ptr != 0)
