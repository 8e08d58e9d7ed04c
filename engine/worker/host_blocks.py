"""Slots of host memory for blocks evicted from the device, and the copies between the two.

The slots are in shared memory, so that the engine's process can write them to disk and fill them from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from serve_llm.common.errors import CapacityError
from serve_llm.engine.parallel.shm import SharedMemory
from serve_llm.engine.scheduler.output import BlockCopy
from serve_llm.engine.worker.kv_cache import SLOTS_OFFSET, HostMemory, KVCacheConfig
from serve_llm.kernels.huge_pages import use_huge_pages

NUM_TRIALS = 5  # trial copies of a block, of which the fastest counts


class HostBlocks:
    """The slots of one rank."""

    def __init__(self, caches: Sequence[Tensor], kv_cache_config: KVCacheConfig, num_slots: int) -> None:
        """caches: as from `allocate_cache`, at least one. num_slots: the same on all ranks."""
        size = kv_cache_config.block_bytes
        self._blocks = torch.empty(0, dtype=torch.uint8, device=caches[0].device)
        self._blocks.set_(caches[0].untyped_storage(), 0, (kv_cache_config.num_blocks, size), (size, 1))
        self._memory = SharedMemory.create(SLOTS_OFFSET + num_slots * size)
        slots = torch.frombuffer(self._memory.bytes, dtype=torch.uint8, offset=SLOTS_OFFSET)
        self._slots = slots.view(num_slots, size)
        self._stream: torch.cuda.Stream | None = None
        if self._blocks.device.type == "cpu":
            use_huge_pages(self._slots)
            self._arrays = self._blocks.numpy(), self._slots.numpy()
        else:
            self._stream = torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
            _pin(self._slots)
        self.description = HostMemory(self._memory.handle, num_slots, size, self._measure())

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Make copies in this order. On a GPU, they are only started, and later launches wait for them.

        They overlap with the steps in flight, which use none of these blocks: a block is reused and filled only after
        the steps that used it have results, which depend on the keys and values of all layers and ranks.
        """
        if self._stream is None:
            self._copy_on_host(copies)
            return
        with torch.cuda.stream(self._stream):
            for copy in copies:
                source = self._blocks[copy.block]
                target = self._slots[copy.slot]
                if copy.to_device:
                    source, target = target, source
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _copy_on_host(self, copies: Iterable[BlockCopy]) -> None:
        """Copy in this thread, because torch would wake all of its threads for each block, which takes longer than
        the copy."""
        blocks, slots = self._arrays
        for copy in copies:
            if copy.to_device:
                blocks[copy.block] = slots[copy.slot]
            else:
                slots[copy.slot] = blocks[copy.block]

    def _measure(self) -> float:
        """Measure the seconds of a copy to the device. Overwrites a block, which must be unused."""
        self._slots[0].fill_(0)
        seconds = []
        for _ in range(NUM_TRIALS):
            began = time.perf_counter()
            self.copy([BlockCopy(0, 0, True)])
            if self._stream is not None:
                self._stream.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)


def _pin(slots: Tensor) -> None:
    """Lock (pin) the memory, so that copies are asynchronous. Raises CapacityError."""
    error = int(torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        raise CapacityError(
            f"--kv-offload-memory: {slots.nbytes:,} bytes cannot be locked for copies (CUDA error {error}); give less, "
            "or raise the limit of locked memory (ulimit -l)"
        )
