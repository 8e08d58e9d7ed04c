"""Restart budget and backoff."""

from __future__ import annotations

import pytest

from serve_llm.common.errors import CapacityError, EngineDead, HostLost, OptionError, RankFailed
from serve_llm.server.engines.restarts import LONGEST_DEVICE_PAUSE, LONGEST_PAUSE, WINDOW_SECONDS, RestartPolicy


def test_an_engine_that_finishes_requests_is_restarted_at_once() -> None:
    restarts = RestartPolicy(100)
    assert [restarts.record_death(EngineDead("x"), number, number) for number in range(5)] == [0.0] * 5


def test_pauses_double_until_a_request_finishes() -> None:
    restarts = RestartPolicy(100)
    assert [restarts.record_death(EngineDead("x"), 0.0, 3) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert [restarts.record_death(EngineDead("x"), 0.0, 3) for _ in range(5)][-1] == LONGEST_PAUSE
    assert [restarts.record_death(EngineDead("x"), 0.0, 4) for _ in range(2)] == [0.0, 0.5]


def test_exceeding_the_limit_raises_the_first_cause_in_the_window() -> None:
    restarts = RestartPolicy(2)
    restarts.record_death(EngineDead("long ago"), 0.0, 0)
    now = WINDOW_SECONDS + 1.0
    restarts.record_death(RankFailed("rank 1 failed"), now, 0)
    restarts.record_death(EngineDead("died"), now, 0)
    with pytest.raises(RankFailed) as failed:
        restarts.record_death(EngineDead("again"), now, 0)
    assert str(failed.value) == (
        "rank 1 failed; then the engine died 2 more times within 10 minutes (--max-restarts 2); the last time: again"
    )


def test_missing_devices_do_not_count_as_deaths() -> None:
    restarts = RestartPolicy(1)
    restarts.record_death(RankFailed("its node is lost"), 0.0, 5)
    pauses = [restarts.record_death(kind("too few"), 1.0, 5) for kind in (OptionError, CapacityError) for _ in range(5)]
    assert pauses[:2] == [0.5, 1.0] and pauses[4] == 8.0 and pauses[-1] == LONGEST_DEVICE_PAUSE
    assert restarts.record_death(OptionError("x"), 1.0, 5) == LONGEST_PAUSE


def test_a_lost_host_counts_once_however_many_engines_it_had() -> None:
    restarts = RestartPolicy(2)
    for host in range(2):
        for engine in range(8):
            restarts.record_death(HostLost(f"engine {engine} died by loss of its node"), 60.0 * host + engine / 8, 0)
    with pytest.raises(HostLost):
        restarts.record_death(HostLost("a third host"), 120.0, 0)


def test_forgiven_deaths_do_not_count() -> None:
    restarts = RestartPolicy(3)
    for _ in range(5):
        for _ in range(3):
            restarts.record_death(EngineDead("x"), 0.0, 0)
        restarts.drop_last_deaths(3)


def test_without_restarts_the_cause_is_raised_unchanged() -> None:
    cause = EngineDead("died")
    with pytest.raises(EngineDead) as failed:
        RestartPolicy(0).record_death(cause, 0.0, 0)
    assert failed.value is cause
