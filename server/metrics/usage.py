"""Requests and tokens by API key and by LoRA adapter, for billing and quotas. The number of labels is bounded."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from serve_llm.common.types import EngineCoreRequest

MAX_LABELS = 100  # further keys or adapters are counted together
OTHERS = "others"


@dataclass
class UsageTotals:
    num_requests: int = 0  # choices that ended, whatever the reason
    prompt_tokens: int = 0  # prompt tokens; a prompt counts once, however many choices it has
    generation_tokens: int = 0  # computed for these choices


class UsageCounter:
    """UsageTotals by label, in the order in which the labels were first seen."""

    def __init__(self) -> None:
        self.current: Container[str] | None = None  # labels that are in use; None: all are
        self._usages = {OTHERS: UsageTotals()}  # so that the metrics exist from the start

    def count(self, label: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count one choice. If there are too many labels, a new one replaces the oldest that is not in use, or counts
        as OTHERS if all are in use."""
        if label not in self._usages and len(self._usages) > MAX_LABELS and not self._drop_oldest():
            label = OTHERS
        usage = self._usages.setdefault(label, UsageTotals())
        usage.num_requests += 1
        usage.prompt_tokens += prompt_tokens
        usage.generation_tokens += generation_tokens

    def _drop_oldest(self) -> bool:
        """False if every label is in use."""
        if self.current is None:
            return False
        oldest = next((label for label in self._usages if label != OTHERS and label not in self.current), None)
        if oldest is None:
            return False
        del self._usages[oldest]
        return True

    def items(self) -> Iterator[tuple[str, UsageTotals]]:
        yield from self._usages.items()


class UsageMeter:
    """Usage of the requests of all engines and front ends, counted when they end."""

    def __init__(self) -> None:
        self.by_key = UsageCounter()  # by the index of the API key; "0" without keys
        self.by_adapter = UsageCounter()  # by name, without the base model

    def watch_adapters(self, loaded: Container[str]) -> None:
        """loaded: the names of the adapters that are served now; it changes with them."""
        self.by_adapter.current = loaded

    def count(self, request: EngineCoreRequest, num_generated: int | None) -> None:
        """Count a request that has ended. num_generated: received tokens; None if there was no output."""
        was_computed = num_generated is not None and request.sampling.choice == 0
        prompt_tokens = len(request.prompt_ids) if was_computed else 0
        self.by_key.count(str(request.tenant), prompt_tokens, num_generated or 0)
        if request.adapter is not None:
            self.by_adapter.count(request.adapter.name, prompt_tokens, num_generated or 0)
