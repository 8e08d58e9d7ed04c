"""Chooses the data-parallel engine for a prompt by cached prefix and load.

Works only from the requests it has placed: it reads no clock and queries no engine. Load and cached prefixes are both
counted in tokens to compute, so that a long prefix is worth waiting for and a short one is not
(docs/decisions/0008-routing-by-prefix.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_llm.common import prefix_hash

REQUEST_TOKENS = 128  # load of an open request besides its prompt, because it takes part in every step until it ends
# An engine is overloaded with more than OVERLOAD_FACTOR * fewest + OVERLOAD_SLACK open requests, where `fewest` is the
# number on the engine with the fewest; such an engine gets no more.
OVERLOAD_FACTOR = 2
OVERLOAD_SLACK = 16


@dataclass
class EngineLoad:
    """Remaining work of an engine."""

    num_open: int = 0  # requests that have not ended
    waiting_tokens: int = 0  # uncached prompt tokens of requests without output so far

    @property
    def tokens(self) -> int:
        return self.waiting_tokens + REQUEST_TOKENS * self.num_open


class Router:
    """Chooses an engine for each prompt and tracks its requests until they end."""

    def __init__(self, capacities: Sequence[int], block_size: int) -> None:
        """capacities: for each engine, the KV cache blocks of `block_size` tokens; 0 without prefix caching."""
        self.loads = [EngineLoad() for _ in capacities]
        self._capacities = list(capacities)
        self._block_size = block_size
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]  # least recently used first
        self._open: dict[int, tuple[int, int]] = {}  # request id -> (engine, its part of waiting_tokens)
        self._next = 0  # the engine that wins the next tie

    def place(
        self,
        request_ids: Iterable[int],
        prompt_ids: Sequence[int],
        salt: str = "",
        engines: Sequence[int] | None = None,
        adapter: str = "",
    ) -> int:
        """Choose one of `engines` (None: all) for all choices of one prompt, and count them as open there. adapter: the
        digest of its adapter.

        Takes the engine with the least load minus cached prompt tokens among those that are not overloaded; ties go to
        the least loaded, then round-robin.
        """
        keys = self._keys(prompt_ids, salt, adapter)
        cached = [self._num_cached(engine, keys) for engine in range(len(self.loads))]
        candidates = range(len(self.loads)) if engines is None else engines
        limit = OVERLOAD_FACTOR * min(self.loads[engine].num_open for engine in candidates) + OVERLOAD_SLACK

        def cost(engine: int) -> tuple[int, int, int]:
            load = self.loads[engine].tokens
            return load - cached[engine], load, (engine - self._next) % len(self.loads)

        engine = min((engine for engine in candidates if self.loads[engine].num_open <= limit), key=cost)
        self._next = (engine + 1) % len(self.loads)
        self._remember(engine, keys)
        waiting = len(prompt_ids) - cached[engine]
        for request_id in request_ids:
            self._open[request_id] = (engine, waiting)
            self.loads[engine].num_open += 1
            self.loads[engine].waiting_tokens += waiting
            waiting = 0  # the other choices find the prompt computed
        return engine

    def mark_computed(self, request_id: int) -> None:
        """Record that the request's prompt is computed, because its first output has arrived."""
        if request_id in self._open:
            engine, waiting = self._open[request_id]
            self.loads[engine].waiting_tokens -= waiting
            self._open[request_id] = (engine, 0)

    def release(self, request_id: int) -> int | None:
        """Forget a request that is no longer open. Returns its engine; None if it was not open."""
        engine, waiting = self._open.pop(request_id, (None, 0))
        if engine is not None:
            self.loads[engine].num_open -= 1
            self.loads[engine].waiting_tokens -= waiting
        return engine

    def forget(self, engine: int) -> None:
        """Forget the cache and the open requests of a lost engine."""
        self._sent[engine].clear()
        self._open = {request_id: entry for request_id, entry in self._open.items() if entry[0] != engine}
        self.loads[engine] = EngineLoad()

    def resize(self, engine: int, capacity: int) -> None:
        """Add the replacement of an engine, which can cache this many blocks."""
        self._capacities[engine] = capacity

    def _keys(self, prompt_ids: Sequence[int], salt: str, adapter: str = "") -> list[bytes]:
        """Prefix hashes of the prompt's full blocks, as engines compute them; at most as many as an engine can hold."""
        size = self._block_size
        num_blocks = min(len(prompt_ids) // size, max(self._capacities))
        return prefix_hash.extend(prefix_hash.root(salt, adapter=adapter), prompt_ids[: num_blocks * size], size)

    def _num_cached(self, engine: int, keys: Sequence[bytes]) -> int:
        """Count the prompt tokens that the engine has cached, or will have, judging by the requests sent to it."""
        sent = self._sent[engine]
        num_blocks = next((index for index, key in enumerate(keys) if key not in sent), len(keys))
        return num_blocks * self._block_size

    def _remember(self, engine: int, keys: Sequence[bytes]) -> None:
        sent = self._sent[engine]
        for key in reversed(keys[: self._capacities[engine]]):  # evict the end of a prompt before its beginning
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._capacities[engine]:
            sent.popitem(last=False)
