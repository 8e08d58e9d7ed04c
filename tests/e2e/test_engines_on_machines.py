"""Data-parallel engines on several hosts without Ray, on machines in network namespaces: same tokens as one rank, and
no stream is lost with a machine. Limits are generous."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from support.daemon import Daemon
from support.fleet import Fleet
from support.matrix import mostly_long
from support.namespaces import Machines
from support.nodes import PROMPTS, SMALL, body
from support.remote_streams import crowd, stream_here, texts_of
from support.tiny import make_served_checkpoint


@pytest.mark.slow
def test_a_machine_that_is_lost_takes_its_engine_and_another_brings_it_back() -> None:
    with Daemon("demo", *SMALL) as alone:
        undisturbed = stream_here(alone.wait_until_serving(), crowd())
    with Machines(3) as machines, ExitStack() as stack:
        fleet = Fleet(machines, stack, 2, "-dp", "2")
        client = fleet.start_streams(crowd())
        machines[1].power_off()
        assert texts_of(client) == undisturbed
        fleet.first.wait_until_logged(
            r"engine 1: rank 0 \(node 1, host host1 at 10\.77\.0\.2, pid \d+\) died in a step by loss of its node.*; "
            "it is replaced"
        )
        fleet.others = [fleet.add(2, 1)]
        fleet.first.wait_until_logged("The engine is ready again after")
        before = fleet.samples("generation_tokens_total")
        assert len(before) == 2 and min(before.values()) > 0
        assert texts_of(fleet.start_streams(crowd())) == undisturbed
        assert all(count > before[engine] for engine, count in fleet.samples("generation_tokens_total").items())
        fleet.end()


ON_THREE_MACHINES = (3, ("-dp", "2", "-pp", "2"))  # the first engine is on two machines, the second on one
EPLB = ("--enable-eplb", "--eplb-config", '{"step_interval": 20, "num_redundant_experts": 3}')


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny model with 5 experts per layer."""
    return make_served_checkpoint(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nnodes", "options"),
    mostly_long(
        [
            (2, ("-dp", "2")),
            (2, ("-dp", "2", "-pp", "2")),
            (2, ("-dp", "2", "-pp", "2", *EPLB)),
            (2, ("-dp", "4", "-pp", "2", "--front-ends", "2")),
            (2, ("-dp", "3", "-tp", "2", "--data-parallel-split", "1,2")),
            ON_THREE_MACHINES,
            (3, ("-dp", "4", "-tp", "2", "--data-parallel-split", "0,2,2")),
        ],
        [(2, ("-dp", "2", "-pp", "2", *EPLB)), ON_THREE_MACHINES],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_experts_on_several_machines(nnodes: int, options: tuple[str, ...], experts: str) -> None:
    """Streams wait for the experts of a lost machine, and continue when another one takes its place."""
    bodies = crowd(max_tokens=300)
    tensor = options[2:4] if "-tp" in options else ()
    with Daemon(experts, "--served-model-name", "demo", *SMALL, *tensor) as alone:
        undisturbed = stream_here(alone.wait_until_serving(), bodies)
    with Machines(nnodes + 1) as machines, ExitStack() as stack:
        fleet = Fleet(machines, stack, nnodes, *options, "--enable-expert-parallel", model=experts)
        client = fleet.start_streams(bodies)
        machines[nnodes - 1].power_off()
        fleet.first.wait_until_logged(
            r"died in a step by loss of its node.*; it and the engines that share experts with it are replaced"
        )
        fleet.others[-1] = fleet.add(nnodes, nnodes - 1)
        assert texts_of(client) == undisturbed
        assert sum("are replaced" in line for line in fleet.first.log) == 1
        fleet.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nnodes", "options"),
    mostly_long(
        [
            (2, ("-dp", "2", "-tp", "2", "--front-ends", "2")),
            (2, ("-dp", "2", "-pp", "2")),
            (2, ("-dp", "3", "-tp", "2", "--data-parallel-split", "1,2")),
            (2, ("-dp", "4", "-tp", "2")),
            (2, ("-dp", "4", "-pp", "2")),
            ON_THREE_MACHINES,
            (3, ("-dp", "3", "-pp", "2")),
            (3, ("-dp", "4", "-pp", "2")),
            (3, ("-dp", "4", "-tp", "2", "--data-parallel-split", "0,2,2")),
        ],
        [
            (2, ("-dp", "2", "-tp", "2", "--front-ends", "2")),
            (3, ("-dp", "3", "-pp", "2")),
            (3, ("-dp", "4", "-tp", "2", "--data-parallel-split", "0,2,2")),
        ],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_every_shape_survives_the_loss_of_the_last_machine(
    nnodes: int, options: tuple[str, ...], continuations: list[str]
) -> None:
    with Machines(nnodes) as machines, ExitStack() as stack:
        fleet = Fleet(machines, stack, nnodes, *options)
        complete = [json.loads(body(prompt=prompt)) for prompt in PROMPTS]
        assert texts_of(fleet.start_streams(complete)) == continuations
        undisturbed = texts_of(fleet.start_streams(crowd()))
        client = fleet.start_streams(crowd())
        machines[nnodes - 1].power_off()
        assert texts_of(client) == undisturbed
        fleet.end()
