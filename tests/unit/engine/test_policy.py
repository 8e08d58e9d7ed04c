from __future__ import annotations

import pytest

from serve_llm.engine.schedule.policy import TokenBudget


def test_budget_follows_measured_speed_within_its_limit() -> None:
    budget = TokenBudget(2048, 0.15)
    for _ in range(50):
        budget.observe(budget.next(), budget.next() / 4000)  # 4,000 tokens/s
    assert 550 <= budget.next() <= 600
    for _ in range(50):
        budget.observe(1000, 1000 / 1_000_000)
    assert budget.next() == 2048


def test_small_steps_do_not_count_and_slow_machines_still_advance() -> None:
    budget = TokenBudget(2048, 0.15)
    before = budget.next()
    budget.observe(1, 10.0)
    assert budget.next() == before
    for _ in range(50):
        budget.observe(64, 10.0)
    assert budget.next() == TokenBudget.SMALLEST


def test_the_users_limit_is_kept_and_no_target_means_the_limit() -> None:
    assert TokenBudget(5, 0.15).next() == 5
    tiny = TokenBudget(5, 0.15)
    tiny.observe(5, 100.0)
    assert tiny.next() == 5
    fixed = TokenBudget(8192, None)
    fixed.observe(8192, 1e-3)
    assert fixed.next() == 8192


def test_steps_grow_where_many_prompts_wait() -> None:
    budget = TokenBudget(2048, 0.15)
    for _ in range(50):
        budget.observe(600, 600 / 4000)
    tokens = [budget.next(waiting) for waiting in (0, 1, 4, 6, 8, 12, 1000)]
    assert tokens == pytest.approx([600, 600, 600, 900, 1200, 1800, 2048], abs=1)


def test_a_burst_is_worked_off_in_steps_as_large_as_its_first() -> None:
    budget = TokenBudget(8192, 0.15)
    for _ in range(50):
        budget.observe(600, 600 / 4000)
    tokens = [budget.next(waiting) for waiting in (8, 5, 1, 12, 2, 0, 2, 1000, 1, 0, 0)]
    assert tokens == pytest.approx([1200, 1200, 1200, 1800, 1800, 600, 600, 2400, 2400, 600, 600], abs=2)
