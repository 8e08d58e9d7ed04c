"""Two choices apart from the mechanics: who waits in which order, and how many tokens a step may compute."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from serve_llm.engine.schedule.sequence import Sequence


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """Waiting sequences: smaller priority first, then the tenant that was served least, then by arrival.

    What a tenant was served is counted in tokens, prompts' and generated ones alike: the virtual token counter of
    "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Who comes back after a pause is counted from
    where the others are, so that nobody saves up by staying away. A preempted sequence keeps its arrival.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[Sequence]] = {}  # (priority, tenant) -> its own, by arrival
        self._served: defaultdict[int, int] = defaultdict(int)  # tenant -> tokens
        self._level = 0  # what the tenant of the sequence admitted last had been served

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In order, by what tenants have been served when the next one is asked for. Sequences may be admitted
        meanwhile."""
        lanes = {key: tuple(lane) for key, lane in self._lanes.items()}
        heads = [(*self._rank(lane[0]), 0, key) for key, lane in lanes.items()]
        heapq.heapify(heads)
        while heads:
            *_, place, key = heads[0]
            yield lanes[key][place]
            place += 1
            if place == len(lanes[key]):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*self._rank(lanes[key][place]), place, key))

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        return sequence.request.priority, self._served[sequence.request.tenant], sequence.arrival

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if not any(key[1] == tenant for key in self._lanes):
            self._served[tenant] = max(self._served[tenant], self._level)
        insort(self._lanes.setdefault((sequence.request.priority, tenant), []), sequence, key=_arrival)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """It waits no longer; so many tokens of its prompt are computed for its tenant."""
        self._level = max(self._level, self._served[sequence.request.tenant])
        self.remove(sequence)
        self.charge(sequence, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens were computed for its tenant."""
        self._served[sequence.request.tenant] += num_tokens

    def remove(self, sequence: Sequence) -> None:
        key = (sequence.request.priority, sequence.request.tenant)
        lane = self._lanes[key]
        del lane[bisect_left(lane, sequence.arrival, key=_arrival)]
        if not lane:
            del self._lanes[key]


class TokenBudget:
    """Tokens for the next step, from measured speed, so that running streams do not stall behind a long prompt.

    Follows the tokens per second of steps that were large enough to tell, and aims at `target_seconds` a step; at up to
    four times as long where many prompts wait, and then until none does: who starts late in a burst runs when the
    others have ended, in small batches that take as long as large ones. Results do not depend on it (promise 3); only
    their timing does.
    """

    SMALLEST = 64  # tokens: below this a step is mostly fixed cost, and a long prompt would crawl
    MANY_WAITING = 4  # prompts, from which on a step grows

    def __init__(self, limit: int, target_seconds: float | None) -> None:
        """`limit`: most tokens in a step, always kept. `target_seconds` None: always the limit."""
        self._limit = limit
        self._target = target_seconds
        self._tokens_per_second: float | None = None
        self._stretch = 1.0  # times the target

    def next(self, num_running: int = 0, num_waiting: int = 0) -> int:
        """`num_running`: sequences that get a token each, whatever the speed; prompts get SMALLEST besides.
        `num_waiting`: sequences that wait for a first chunk."""
        if self._target is None:
            return self._limit
        lasting = self._stretch if num_waiting else 1.0
        self._stretch = max(lasting, min(4.0, num_waiting / self.MANY_WAITING))
        speed = self._tokens_per_second
        wanted = 512 if speed is None else int(self._stretch * self._target * speed)
        return min(self._limit, max(self.SMALLEST + num_running, wanted))

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < min(self.SMALLEST, self._limit) or seconds <= 0:
            return
        speed = num_tokens / seconds
        old = self._tokens_per_second
        self._tokens_per_second = speed if old is None else 0.7 * old + 0.3 * speed
