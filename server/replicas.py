"""Data parallelism: several engines with the same model, seen as one. A single engine is a set of one.

Every request goes to one engine and stays there; `server.balance` says to which. Knows nothing of processes (those are
`server.supervise`'s) and nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from serve_llm.engine.errors import EngineError
from serve_llm.engine.types import ModelFacts, Output, Request, Stats
from serve_llm.engine.wire import Step
from serve_llm.server.balance import Balancer

Sink = Callable[[Output], None]


class Engine(Protocol):
    """What of `engine.client.EngineClient` the server uses."""

    stats: Stats
    on_step: Callable[[Step], None] | None

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...

    def next_id(self) -> int: ...

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> None: ...

    def abort(self, ids: Sequence[int]) -> None: ...


class Replicas:
    """Make it when all engines are ready: how much each can cache is known only then."""

    def __init__(self, engines: Sequence[Engine], *, prefix_caching: bool = True) -> None:
        self.engines = tuple(engines)
        self.on_step: Callable[[int, Step], None] | None = None  # called with the engine's index
        self._balancer: Balancer | None = None  # a single engine needs none
        if len(self.engines) > 1:
            capacities = [engine.facts.num_kv_blocks if prefix_caching else 0 for engine in self.engines]
            self._balancer = Balancer(capacities, self.engines[0].facts.block_size)
        for index, engine in enumerate(self.engines):
            engine.on_step = partial(self._count_step, index)

    @property
    def ready(self) -> bool:
        """A request submitted now would be computed, whichever engine it goes to."""
        return all(engine.ready for engine in self.engines)

    @property
    def facts(self) -> ModelFacts:
        """What is true of every engine: those of the one with the smallest KV cache."""
        return min((engine.facts for engine in self.engines), key=lambda facts: facts.num_kv_blocks)

    def next_id(self) -> int:
        return self.engines[0].next_id()

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> list[int]:
        """Open requests, all choices of a prompt on one engine. Returns the index of the engine of each.
        Raises EngineDead if an engine is gone; nothing is open then."""
        pairs = list(pairs)
        if self._balancer is None:
            self.engines[0].submit_many(pairs)
            return [0] * len(pairs)
        placed: list[int] = []
        parts: list[list[tuple[Request, Sink]]] = [[] for _ in self.engines]
        for _, group in groupby(pairs, key=lambda pair: id(pair[0].prompt_ids)):  # the choices of a prompt share it
            choices = list(group)
            first = choices[0][0]
            index = self._balancer.place([request.id for request, _ in choices], first.prompt_ids, first.cache_salt)
            parts[index] += choices
            placed += [index] * len(choices)
        try:
            for engine, part in zip(self.engines, parts, strict=True):
                if part:
                    engine.submit_many(part)
        except EngineError:
            self.abort([request.id for request, _ in pairs])
            raise
        return placed

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; their sinks are not called again. Ids that have ended already are fine."""
        if self._balancer is None:
            self.engines[0].abort(ids)
            return
        parts: list[list[int]] = [[] for _ in self.engines]
        for request_id in ids:
            index = self._balancer.ended(request_id)
            if index is not None:
                parts[index].append(request_id)
        for engine, part in zip(self.engines, parts, strict=True):
            if part:
                engine.abort(part)

    def _count_step(self, index: int, step: Step) -> None:
        """An engine's step hook, called before the step's outputs are handed out."""
        if self._balancer is not None:
            for output in step.outputs:
                if output.finish_reason is not None:
                    self._balancer.ended(output.id)
                elif output.cached_tokens is not None:
                    self._balancer.began(output.id)
        if self.on_step is not None:
            self.on_step(index, step)
