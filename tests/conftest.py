"""Configuration of all tests.

torch uses one thread in this process, because tiny models only lose by more. Daemons choose their own number of
threads; these do not spin while waiting, because other tests need the cores.

`--cpu-isa avx2` runs the tests, and the processes that they start, as on a processor without newer instruction sets.

Triton's kernels run in its interpreter, which must be selected before anything imports triton.

A test may configure logging as a daemon does; the loggers are restored afterwards.

A test with the marker `pairs` must use the named features together: see `support.observed`.

Hypothesis draws the same examples in every run; `--hypothesis-profile random` draws new ones.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("repeatable")

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["MKL_CBWR"] = "AUTO,STRICT"  # as in engine processes
# For Triton's interpreter: OpenBLAS' AVX2 kernels give a row different bits at another position in a tile.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
ISA_LIMITS = {  # our variants and oneDNN, torch's own kernels, MKL
    "baseline": ("SSE41", "default", "SSE4_2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "amx": None,
}

LOGGERS = (None, "serve_llm", "uvicorn", "uvicorn.error", "uvicorn.access")


@pytest.fixture(autouse=True)
def restore_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@dataclass
class PairsOfTest:
    """What is known about a test function with the marker `pairs`, or about its slow items."""

    pairs: set[str] = field(default_factory=set)
    required: set[str] = field(default_factory=set)  # ids of the items that together use all pairs
    done: set[str] = field(default_factory=set)
    seen: set[frozenset[str]] = field(default_factory=set)


PAIRS = pytest.StashKey[dict[tuple[str, bool], PairsOfTest]]()


def find_group(item: pytest.Item) -> tuple[str, bool]:
    """Return the group of an item that uses pairs of features: the function's name, and whether the item is slow."""
    return item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Collect the pairs that items must use: items that are not slow, those of the markers without `slow`; slow items,
    those of the other markers; a function that is slow as a whole, all pairs."""
    groups: defaultdict[tuple[str, bool], PairsOfTest] = defaultdict(PairsOfTest)
    config.stash[PAIRS] = groups
    if any("[" in argument for argument in config.args):
        return  # only some items of a function were collected
    marked = [item for item in items if item.get_closest_marker("pairs") is not None]
    quick = {find_group(item)[0] for item in marked if not find_group(item)[1]}
    for item in marked:
        name, is_slow = find_group(item)
        group = groups[name, is_slow]
        group.required.add(item.nodeid)
        for marker in item.iter_markers("pairs"):
            if name not in quick or marker.kwargs.get("slow", False) == is_slow:
                group.pairs.update(marker.args)


@pytest.fixture(autouse=True)
def observe_pairs(request: pytest.FixtureRequest) -> Iterator[None]:
    group = request.config.stash[PAIRS].get(find_group(request.node))
    if group is None or not group.pairs:
        yield
        return
    from support.observed import Observer, find_missing

    with Observer() as observer:
        yield
    group.seen |= observer.find_pairs()
    group.done.add(request.node.nodeid)
    if group.done >= group.required and (missing := find_missing(sorted(group.pairs), group.seen)):
        pytest.fail(f"the test does not use these features together: {', '.join(missing)}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-isa", choices=ISA_LIMITS, help="the most that the processor seems to have; default: all")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before anything imports torch, which reads the variables when it is loaded."""
    isa = config.getoption("--cpu-isa")
    if isa is None:
        return
    limits = ISA_LIMITS[isa]
    if limits is not None:
        os.environ.update(zip(ISA_VARIABLES, limits, strict=True))
    from serve_llm.kernels.cpu import library

    path = library.find()
    if path is None or library.Library(path).variant != isa:
        raise pytest.UsageError(f"--cpu-isa {isa}: the compiled kernels have nothing for it on this processor")
