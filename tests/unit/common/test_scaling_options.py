"""Bounds on the number of engines: defaults and contradictions."""

import pytest

from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options, parse_args

NODES = ("--master-addr", "10.0.0.1:29500", "-tp", "2", "--nnodes", "2")


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2, 2, False)),
        ({"data_parallel_max": 5}, (1, 5, True)),
        ({"data_parallel_min": 1}, (1, 2, True)),
        ({"data_parallel_min": 2, "data_parallel_max": 3}, (2, 3, True)),
    ],
)
def test_bounds(given: dict[str, int], bounds: tuple[int, int, bool]) -> None:
    options = make_options("demo", data_parallel_size=2, **given)
    assert (options.min_engines, options.max_engines, options.is_scalable) == bounds
    assert len(EnginePlacement.from_options(options.for_engine()).nodes) == bounds[1], "each has a share of the host"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-dp", "4", "--data-parallel-max", "3"], "4 is not between --data-parallel-min 1 and --data-parallel-max 3"),
        (["--data-parallel-min", "2"], "1 is not between --data-parallel-min 2 and --data-parallel-max 1"),
        ([*NODES, "--data-parallel-max", "3"], "cannot be combined with --nnodes"),
        (["--data-parallel-max", "3", "--enable-expert-parallel"], "cannot be combined with --enable-expert-parallel"),
    ],
)
def test_contradictions_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_args(["demo", *argv], {})
    assert str(raised.value).startswith("--data-parallel-") and message in str(raised.value)
