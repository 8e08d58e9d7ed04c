"""Scheduling policies: the order of waiting requests, and the token budget of a step."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from serve_llm.engine.scheduler.sequence import Sequence

CPU_STEP_SECONDS = 0.15  # target on a CPU: the longest time for which a prompt delays running streams


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """Waiting sequences, ordered by priority value, then by the service their tenant has received, then by arrival.

    Service is counted in tokens, of prompts and output alike: the virtual token counter of "Fairness in Serving Large
    Language Models" (Sheng et al., OSDI 2024). A tenant that returns after a pause starts at the level of the others,
    so that pausing earns no credit. A preempted sequence keeps its arrival number.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[Sequence]] = {}  # (priority, tenant) -> sequences by arrival
        self._served: defaultdict[int, int] = defaultdict(int)  # tenant -> tokens
        self._level = 0  # service of the tenant whose sequence was admitted last

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def count_before(self, priority: int) -> int:
        """Count the sequences that come before all of this priority."""
        return sum(len(lane) for key, lane in self._lanes.items() if key[0] < priority)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order of service, evaluated at each step. Sequences may be admitted during iteration."""
        lanes = {key: tuple(lane) for key, lane in self._lanes.items()}
        heads = [(*self._rank(lane[0]), 0, key) for key, lane in lanes.items()]
        heapq.heapify(heads)
        while heads:
            *_, position, key = heads[0]
            yield lanes[key][position]
            position += 1
            if position == len(lanes[key]):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*self._rank(lanes[key][position]), position, key))

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        return sequence.request.priority, self._served[sequence.request.tenant], sequence.arrival

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if not any(key[1] == tenant for key in self._lanes):
            self._served[tenant] = max(self._served[tenant], self._level)
        insort(self._lanes.setdefault((sequence.request.priority, tenant), []), sequence, key=_arrival)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Remove an admitted sequence. num_tokens: prompt tokens to charge to its tenant."""
        self._level = max(self._level, self._served[sequence.request.tenant])
        self.remove(sequence)
        self.charge(sequence, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens computed for the sequence's tenant."""
        self._served[sequence.request.tenant] += num_tokens

    def remove(self, sequence: Sequence) -> None:
        key = (sequence.request.priority, sequence.request.tenant)
        lane = self._lanes[key]
        del lane[bisect_left(lane, sequence.arrival, key=_arrival)]
        if not lane:
            del self._lanes[key]


class TokenBudget:
    """Token budget of the next step, from measured speed, so that running streams do not stall behind a long prompt.

    Tracks the tokens per second of large steps and aims at `target_seconds` per step. From the time that many prompts
    wait until none does, the target is up to four times as long, because requests that start late in a burst continue
    after the others have ended, in small batches that take as long as large ones. While batches fill the pauses of
    other requests, a step takes as long as the decode steps of these requests did, and at most a sixth of the target:
    the next such request waits for the end of a step, as it would behind another request. The budget affects only the
    timing of results.
    """

    SMALLEST = 64  # tokens; a smaller step is mostly fixed cost
    MANY_WAITING = 4  # waiting prompts above which steps grow
    FEW = 16  # minimum tokens of a step in such a pause
    FEW_WITHOUT_TARGET = 256  # the same on a GPU, where fewer take as long

    def __init__(self, limit: int, target_seconds: float | None) -> None:
        """limit: maximum number of tokens in a step. target_seconds: None to always use `limit`."""
        self._limit = limit
        self._target = target_seconds
        self._tokens_per_second: float | None = None
        self._decode_seconds: float | None = None  # duration of a decode step while requests other than batches run
        self._tokens_per_second_in_pause: float | None = None
        self._stretch = 1.0  # factor on the target

    @property
    def seconds_per_token(self) -> float | None:
        """The seconds per token of large steps; None before the first one."""
        return None if self._tokens_per_second is None else 1.0 / self._tokens_per_second

    def next(self, num_running: int = 0, num_waiting: int = 0, in_pause: bool = False) -> int:
        """num_running: sequences that get one token each at any speed, besides SMALLEST prompt tokens. num_waiting:
        sequences not admitted yet. in_pause: only batches run, and other requests are expected."""
        previous = self._stretch if num_waiting else 1.0
        self._stretch = max(previous, min(4.0, num_waiting / self.MANY_WAITING))
        speed = self._tokens_per_second
        if in_pause and speed is not None:
            return self._choose_in_pause(self._tokens_per_second_in_pause or speed)
        if self._target is None:
            return self._limit
        wanted = 512 if speed is None else int(self._stretch * self._target * speed)
        return min(self._limit, max(self.SMALLEST + num_running, wanted))

    def _choose_in_pause(self, speed: float) -> int:
        limits = [] if self._target is None else [self._target / 6]
        if self._decode_seconds is not None:
            limits.append(self._decode_seconds)
        if not limits:
            return self._limit
        fewest = self.FEW_WITHOUT_TARGET if self._target is None else self.FEW
        return min(self._limit, max(fewest, int(min(limits) * speed)))

    def observe_decode(self, seconds: float) -> None:
        """Record a decode step that ran while there were requests other than batches."""
        self._decode_seconds = _average(self._decode_seconds, seconds, 0.1)

    def observe_in_pause(self, num_tokens: int, seconds: float) -> None:
        """Record a step of batches in a pause, whose rows take longer than a prompt's tokens."""
        if seconds <= 0:
            return
        self._tokens_per_second_in_pause = _average(self._tokens_per_second_in_pause, num_tokens / seconds, 0.3)

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < min(self.SMALLEST, self._limit) or seconds <= 0:
            return
        self._tokens_per_second = _average(self._tokens_per_second, num_tokens / seconds, 0.3)


def _average(old: float | None, latest: float, weight: float) -> float:
    """Exponential moving average. old: None before the first value. weight: of the latest value."""
    return latest if old is None else (1.0 - weight) * old + weight * latest
