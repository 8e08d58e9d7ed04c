"""Which of several engines computes a prompt: where it is soonest computed, by cached prefix and load.

Pure bookkeeping of what was sent where: no clock, no engine, no guess at what cannot be known here. Load and cached
prefixes are both counted in tokens to compute, so that they can be weighed against each other: a long prefix is worth
waiting for, a short one is not (docs/decisions/0008-routing-by-prefix.md). Only `server.replicas` calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_llm.engine.schedule import prefix

REQUEST_TOKENS = 128  # what an open request counts for: it takes a place in every step until it ends
OVERLOAD, SLACK = 2, 16  # an engine with more open requests than OVERLOAD times the fewest, and SLACK, gets no more


@dataclass
class Load:
    """What an engine still has to do."""

    num_open: int = 0  # requests that have not ended
    waiting_tokens: int = 0  # prompt tokens, those found in the cache left out, of requests without output so far

    @property
    def tokens(self) -> int:
        return self.waiting_tokens + REQUEST_TOKENS * self.num_open


class Balancer:
    """Chooses an engine for each prompt and keeps account of its requests until they end."""

    def __init__(self, capacities: Sequence[int], block_size: int) -> None:
        """`capacities`: for each engine, the blocks (of `block_size` tokens) that its KV cache holds; 0 if it caches no
        prefixes."""
        self.loads = [Load() for _ in capacities]
        self._capacities = list(capacities)
        self._block_size = block_size
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]  # least recently used first
        self._open: dict[int, tuple[int, int]] = {}  # request id -> (engine, tokens it still counts as waiting)
        self._next = 0  # the engine that gets the next one, other things being equal

    def place(
        self,
        request_ids: Iterable[int],
        prompt_ids: Sequence[int],
        salt: str = "",
        engines: Sequence[int] | None = None,
    ) -> int:
        """The engine for all choices of one prompt, which are then open there: one of `engines` (None: of all).

        Of the engines that are not overloaded, the one with the least load less what it has cached of the prompt; ties
        go to the least loaded one, then to each in turn.
        """
        keys = self._keys(prompt_ids, salt)
        cached = [self._num_cached(engine, keys) for engine in range(len(self.loads))]
        able = range(len(self.loads)) if engines is None else engines
        limit = OVERLOAD * min(self.loads[engine].num_open for engine in able) + SLACK

        def cost(engine: int) -> tuple[int, int, int]:
            load = self.loads[engine].tokens
            return load - cached[engine], load, (engine - self._next) % len(self.loads)

        engine = min((engine for engine in able if self.loads[engine].num_open <= limit), key=cost)
        self._next = (engine + 1) % len(self.loads)
        self._remember(engine, keys)
        waiting = len(prompt_ids) - cached[engine]
        for request_id in request_ids:
            self._open[request_id] = (engine, waiting)
            self.loads[engine].num_open += 1
            self.loads[engine].waiting_tokens += waiting
            waiting = 0  # the other choices find the prompt computed
        return engine

    def began(self, request_id: int) -> None:
        """The request's first output came: its prompt is computed."""
        if request_id in self._open:
            engine, waiting = self._open[request_id]
            self.loads[engine].waiting_tokens -= waiting
            self._open[request_id] = (engine, 0)

    def ended(self, request_id: int) -> int | None:
        """The request is no longer open, for whatever reason. Returns its engine; None if it was not open."""
        engine, waiting = self._open.pop(request_id, (None, 0))
        if engine is not None:
            self.loads[engine].num_open -= 1
            self.loads[engine].waiting_tokens -= waiting
        return engine

    def forget(self, engine: int) -> None:
        """The engine is gone, and with it what it had cached and what was open there."""
        self._sent[engine].clear()
        self._open = {request_id: entry for request_id, entry in self._open.items() if entry[0] != engine}
        self.loads[engine] = Load()

    def resize(self, engine: int, capacity: int) -> None:
        """Another engine in its place can cache so many blocks."""
        self._capacities[engine] = capacity

    def _keys(self, prompt_ids: Sequence[int], salt: str) -> list[bytes]:
        """Names of the prompt's full blocks, as the engines name them; no more than an engine can hold."""
        size = self._block_size
        num_blocks = min(len(prompt_ids) // size, max(self._capacities))
        keys, key = [], prefix.root(salt)
        for start in range(0, num_blocks * size, size):
            key = prefix.extend(key, prompt_ids[start : start + size])
            keys.append(key)
        return keys

    def _num_cached(self, engine: int, keys: Sequence[bytes]) -> int:
        """Tokens of the prompt that the engine has computed, or soon will have, as far as is known here."""
        sent = self._sent[engine]
        found = next((index for index, key in enumerate(keys) if key not in sent), len(keys))
        return found * self._block_size

    def _remember(self, engine: int, keys: Sequence[bytes]) -> None:
        sent = self._sent[engine]
        for key in reversed(keys[: self._capacities[engine]]):  # a prefix outlives what follows it
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._capacities[engine]:
            sent.popitem(last=False)
