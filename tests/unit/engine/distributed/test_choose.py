"""The rule that chooses an executor, and the facts that it considers."""

from __future__ import annotations

import pytest

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.engine.distributed.choose import ExecutorFacts, choose_executor, gather_facts


@pytest.mark.parametrize(
    ("asked", "num_ranks", "in_placement_group", "num_gpus", "backend", "reason"),
    [
        ("ray", 1, False, None, "ray", "requested"),
        ("mp", 1, True, None, "mp", "requested"),
        ("mp", 4, False, 4, "mp", "requested"),
        ("inprocess", 1, True, 8, "inprocess", "requested"),
        (None, 1, True, 1, "ray", "placement group"),
        (None, 4, True, None, "ray", "placement group"),
        (None, 1, False, None, "inprocess", "one rank"),
        (None, 1, False, 0, "inprocess", "one rank"),
        (None, 64, False, None, "mp", "64 ranks fit on a CPU host"),
        (None, 4, False, 4, "mp", "4 GPUs for 4 ranks"),
        (None, 4, False, 2, "ray", "4 ranks need more than the 2 GPUs"),
    ],
)
def test_rule(
    asked: str | None, num_ranks: int, in_placement_group: bool, num_gpus: int | None, backend: str, reason: str
) -> None:
    choice = choose_executor(ExecutorFacts(asked, num_ranks, in_placement_group, num_gpus))
    assert choice.backend == backend and reason in choice.reason


def test_executors_that_cannot_run_so_many() -> None:
    with pytest.raises(OptionError, match="--distributed-executor-backend: inprocess runs one rank, not 2"):
        choose_executor(ExecutorFacts("inprocess", 2, False, None))
    with pytest.raises(CapacityError, match="mp needs 4 GPUs on this host, which has 2"):
        choose_executor(ExecutorFacts("mp", 4, False, 2))


@pytest.mark.parametrize(
    ("engine", "tensor", "backend", "reason"),
    [
        (0, 1, "inprocess", "there is one rank"),
        (0, 2, "mp", "the engine's 2 ranks are on this host"),
        (2, 1, "mp", "--nnodes puts the engine's one rank on node 1"),
        (2, 2, "mp", "--nnodes puts the engine's 2 ranks on node 1"),
    ],
)
def test_engines_on_several_hosts(engine: int, tensor: int, backend: str, reason: str) -> None:
    nodes = {"nnodes": 2, "master_addr": "h:1", "data_parallel_size": 3, "device": "cpu"}
    options = make_options("demo", tensor_parallel_size=tensor, **nodes)
    choice = choose_executor(gather_facts(options, in_placement_group=True, engine=engine))
    assert (choice.backend, choice.reason) == (backend, reason)
    ray = make_options("demo", distributed_executor_backend="ray", **nodes)
    with pytest.raises(OptionError, match="--nnodes: Ray places ranks by itself"):
        choose_executor(gather_facts(ray, engine=engine))


def test_facts_of_a_cpu_host() -> None:
    options = make_options("demo", tensor_parallel_size=3, pipeline_parallel_size=2, device="cpu")
    assert gather_facts(options) == ExecutorFacts(None, 6, False, None)
    assert gather_facts(options, in_placement_group=True).in_placement_group
    alone = make_options("m", model_impl="transformers", device="cpu")
    assert choose_executor(gather_facts(alone, in_placement_group=True)).backend == "inprocess"
