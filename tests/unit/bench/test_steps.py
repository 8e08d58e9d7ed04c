"""The profile of a step, on a tiny model: every part is found and measured, and the sums are right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.roofline import Limits
from bench.steps import CALLS, ORDER, Bench, Stopwatch, decode, kernel_part, middle_half, prefill, table
from serve_llm.common.hub import resolve_model


def test_time_inside_another_part_is_taken_off_that_one() -> None:
    watch = Stopwatch()
    inner = watch.wrap("inner", lambda: time.sleep(0.02))
    outer = watch.wrap("outer", lambda: (time.sleep(0.005), inner(), inner()))
    outer()
    assert not watch.seconds, "it is off"
    watch.on = True
    began = time.perf_counter()
    outer()
    whole = time.perf_counter() - began
    assert watch.seconds["inner"] >= 0.04 and 0.005 <= watch.seconds["outer"] < whole - 0.04 + 1e-9
    assert sum(watch.seconds.values()) == pytest.approx(whole, abs=1e-3)


def test_outliers_are_left_out_of_the_mean() -> None:
    steps = [(seconds, {"a": seconds / 2}) for seconds in (1.0, 3.0, 2.0, 100.0)]
    assert middle_half(steps) == (2.5, {"a": 1.25})


@pytest.mark.parametrize(
    ("kernel", "part"),
    [("paged_attention", "attention"), ("write_cache", "rope, cache"), ("add_rms_norm", "norms"), ("new", "new")],
)
def test_kernels_are_parts_by_their_names(kernel: str, part: str) -> None:
    assert kernel_part(kernel) == part


def test_every_part_of_a_real_engine_is_measured() -> None:
    limits = Limits(10.0, 100.0)
    with Bench(Path(resolve_model("demo")), max_model_len="1k", kv_cache_memory="64MiB") as bench:
        assert bench.missing == [], "the engine has changed: say in CALLS where these are now"
        cases = {"decode, 2": decode(bench, 2, 8, limits), "prefill": prefill(bench, limits)}
    for case in cases.values():
        assert {part for part, seconds in case.parts.items() if seconds > 0} == {*ORDER}
        assert sum(case.parts.values()) <= case.timed
    assert {part for part, _ in CALLS} <= {*ORDER}
    few, many = cases["decode, 2"], cases["prefill"]
    assert few.weights == many.weights > 0 and many.operations > 50 * few.operations
    text = "\n".join(table(cases))
    assert all(part in text for part in ORDER) and "roofline" in text
