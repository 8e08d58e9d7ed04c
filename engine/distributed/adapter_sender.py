"""Adds adapter files to the steps sent to ranks on other hosts, which may lack the files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from serve_llm.common.errors import AdapterError, EngineError
from serve_llm.engine.lora.adapter_memory import AdapterMemory
from serve_llm.engine.lora.hashed_files import read_files
from serve_llm.engine.scheduler.output import NewRequestData, SchedulerOutput


class AdapterSender:
    """Sends the files of an adapter once, and again after those ranks have evicted it."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: as in the ranks' `AdapterMemory`."""
        self._memory: AdapterMemory[bool] = AdapterMemory(max_kept)

    def add_files(self, scheduler_output: SchedulerOutput) -> SchedulerOutput | None:
        """Build the step for those ranks; None if it equals that of all ranks. Raises EngineError if files cannot be
        read."""
        new_requests = [self._add(new) for new in scheduler_output.new_requests]
        if all(new.adapter_files is None for new in new_requests):
            return None
        return msgspec.structs.replace(scheduler_output, new_requests=new_requests)

    def _add(self, new: NewRequestData) -> NewRequestData:
        adapter = new.adapter
        slot = new.adapter_slot
        if adapter is None or slot is None or self._memory.is_in_slot(adapter.digest, slot):
            return new
        is_kept = self._memory.find(adapter.digest) is not None
        self._memory.put(adapter.digest, slot, True)
        if is_kept:
            return new
        try:
            files = read_files(Path(adapter.directory))
        except AdapterError as error:
            raise EngineError(f"the adapter {adapter.name} cannot be sent to other hosts: {error}") from error
        return msgspec.structs.replace(new, adapter_files=files)
