"""A step while it is being scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens
from serve_llm.engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class PlannedStep:
    """What has been scheduled so far, and what may still be added."""

    max_tokens: int
    budget: int  # tokens left of max_tokens
    new_requests: list[NewRequestData] = field(default_factory=list)
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    max_drafts: int = 0  # that may still be added
    long_prefill: Sequence | None = None  # scheduled last, with `long_prefill_count` tokens or more
    long_prefill_count: int = 0
    is_out_of_blocks: bool = False  # a running sequence found no blocks, or another was preempted for it

    @property
    def num_sequences(self) -> int:
        return len(self.scheduled) + (self.long_prefill is not None)

    @property
    def is_decode(self) -> bool:
        """Whether an id is sampled after every token so far; see `SchedulerOutput.is_decode`."""
        return all(chunk.samples_every_token for chunk in self.scheduled)
