"""Which hosts of --nnodes run which ranks of which data-parallel engine.

A function of the options alone, so that node 0, its engines and every other host agree without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.splits import split_evenly


@dataclass(frozen=True)
class EnginePlacement:
    """The hosts ("nodes", by number) of every engine. With at least as many engines as hosts, each engine fits on one
    host; with fewer, each engine gets its own consecutive hosts."""

    num_ranks: int  # ranks of each engine
    nodes: tuple[range, ...]  # by engine: the numbers of its hosts

    @classmethod
    def from_options(cls, options: EngineOptions) -> EnginePlacement:
        num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
        num_engines = options.max_engines
        num_nodes = options.nnodes
        if options.data_parallel_split is None and num_engines < num_nodes:
            return cls(num_ranks, split_evenly(num_nodes, num_engines))
        if options.data_parallel_split is None:
            engines = split_evenly(num_engines, num_nodes)
        else:
            borders = [0, *accumulate(options.data_parallel_split)]
            engines = tuple(range(start, stop) for start, stop in pairwise(borders))
        hosts = ([range(node, node + 1)] * len(here) for node, here in enumerate(engines))
        return cls(num_ranks, tuple(chain.from_iterable(hosts)))

    def ranks(self, engine: int) -> dict[int, range]:
        """Map each host of the engine to the engine's ranks on it."""
        nodes = self.nodes[engine]
        return dict(zip(nodes, split_evenly(self.num_ranks, len(nodes)), strict=True))

    def local_ranks(self, engine: int, node: int = 0) -> range:
        """Return this engine's ranks on this host; empty if there are none."""
        return self.ranks(engine).get(node, range(0))

    def engines(self, node: int) -> list[int]:
        """The engines that have ranks on this host."""
        return [engine for engine, nodes in enumerate(self.nodes) if node in nodes]

    def engines_by_rank(self, engine: int) -> tuple[int, ...]:
        """For each rank of this engine, count the engines that have ranks on the same host."""
        return tuple(len(self.engines(node)) for node, ranks in self.ranks(engine).items() for _ in ranks)

    def ports(self, first: int) -> dict[int, int]:
        """Map each engine that spans several hosts to the port on which node 0 waits for the other hosts.

        first: the port of --master-addr, on which one engine always listens.
        """
        spread = [engine for engine in range(len(self.nodes)) if self.local_ranks(engine) != range(self.num_ranks)]
        return {engine: first + index for index, engine in enumerate(spread)}
