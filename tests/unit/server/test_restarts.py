"""How often, and after what pauses, an engine is started again."""

from __future__ import annotations

import pytest

from serve_llm.engine.errors import CapacityError, EngineDead, OptionError, RankFailed
from serve_llm.server.restarts import LONGEST_PAUSE, WINDOW_SECONDS, Restarts


def test_an_engine_that_gets_work_done_is_replaced_at_once() -> None:
    restarts = Restarts(100)
    assert [restarts.after(EngineDead("x"), number, number) for number in range(5)] == [0.0] * 5


def test_pauses_double_while_nothing_is_done_and_begin_anew() -> None:
    restarts = Restarts(100)
    assert [restarts.after(EngineDead("x"), 0.0, 3) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert [restarts.after(EngineDead("x"), 0.0, 3) for _ in range(5)][-1] == LONGEST_PAUSE
    assert [restarts.after(EngineDead("x"), 0.0, 4) for _ in range(2)] == [0.0, 0.5]


def test_one_too_many_raises_the_first_cause_of_the_window() -> None:
    restarts = Restarts(2)
    restarts.after(EngineDead("long ago"), 0.0, 0)
    now = WINDOW_SECONDS + 1.0
    restarts.after(RankFailed("rank 1 failed"), now, 0)
    restarts.after(EngineDead("died"), now, 0)
    with pytest.raises(RankFailed) as failed:
        restarts.after(EngineDead("again"), now, 0)
    assert str(failed.value) == (
        "rank 1 failed; then the engine died 2 more times within 10 minutes (--max-restarts 2); the last time: again"
    )


def test_missing_devices_are_waited_for() -> None:
    restarts = Restarts(1)
    restarts.after(RankFailed("its node is lost"), 0.0, 5)
    pauses = [restarts.after(kind("too few"), 1.0, 5) for kind in (OptionError, CapacityError) for _ in range(5)]
    assert pauses[:2] == [0.5, 1.0] and pauses[-1] == LONGEST_PAUSE


def test_deaths_whose_cause_was_found_do_not_count() -> None:
    restarts = Restarts(3)
    for _ in range(5):
        for _ in range(3):
            restarts.after(EngineDead("x"), 0.0, 0)
        restarts.forgive(3)


def test_without_restarts_the_cause_stays_as_it_is() -> None:
    cause = EngineDead("died")
    with pytest.raises(EngineDead) as failed:
        Restarts(0).after(cause, 0.0, 0)
    assert failed.value is cause
