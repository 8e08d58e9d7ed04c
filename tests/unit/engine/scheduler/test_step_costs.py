"""The cost of drafts, estimated from the times of steps with and without them under any disturbance; and when drafts
pause."""

from __future__ import annotations

import random

import pytest

from serve_llm.engine.scheduler.step_costs import DraftPause, StepCosts

PLAIN = 0.010  # seconds of a step without drafts


def observe_steps(costs: StepCosts, count: int, fixed: float, each: float, seconds: float = PLAIN) -> None:
    """Observe steps of 8 sequences. fixed, each: the cost of drafts in seconds."""
    for number in range(count):
        num_drafts = (0, 1, 0, 2, 0, 5)[number % 6]
        costs.observe(8, num_drafts, seconds + fixed * (num_drafts > 0) + each * num_drafts)


def test_the_first_draft_costs_more_than_others() -> None:
    costs = StepCosts()
    assert costs.find_draft_cost(8) == StepCosts.UNKNOWN and costs.find_fixed_cost(8) == 0.0
    observe_steps(costs, 120, fixed=0.0010, each=0.0002)
    assert costs.find_step_seconds() == pytest.approx(PLAIN)
    assert costs.find_fixed_cost(8) == pytest.approx(0.8, rel=0.1), "0.1 of a step that makes 8 ids"
    assert costs.find_draft_cost(8) == pytest.approx(0.16, rel=0.1)
    free = StepCosts()
    observe_steps(free, 120, fixed=0.0, each=0.0)
    assert free.find_fixed_cost(8) == free.find_draft_cost(8) == 0.0


def test_drafts_that_make_a_step_shorter_cost_nothing() -> None:
    costs = StepCosts()
    observe_steps(costs, 60, fixed=-0.002, each=0.0)
    assert costs.find_fixed_cost(8) == costs.find_draft_cost(8) == 0.0


def test_steps_that_are_held_up_count_little() -> None:
    rng = random.Random(4)
    costs = StepCosts()
    for number in range(400):
        num_drafts = 0 if number % 2 else rng.randrange(1, 6)
        seconds = PLAIN * rng.uniform(0.95, 1.05) + 0.001 * (num_drafts > 0)
        costs.observe(8, num_drafts, 40 * seconds if rng.random() < 0.03 else seconds)
    assert costs.find_step_seconds() < 1.2 * PLAIN
    assert costs.find_fixed_cost(8) + 3 * costs.find_draft_cost(8) < 2.0


def test_all_steps_become_slower() -> None:
    """With other work on the machine, drafts still cost the same share."""
    costs = StepCosts()
    observe_steps(costs, 90, fixed=0.001, each=0.0)
    observe_steps(costs, 240, fixed=0.004, each=0.0, seconds=4 * PLAIN)
    assert costs.find_step_seconds() == pytest.approx(4 * PLAIN, rel=0.05)
    assert costs.find_fixed_cost(8) + 2 * costs.find_draft_cost(8) == pytest.approx(0.8, rel=0.3)


def test_costs_are_forgotten_while_there_are_no_drafts() -> None:
    costs = StepCosts()
    observe_steps(costs, 60, fixed=0.001, each=0.0002)
    fixed, each = costs.find_fixed_cost(8), costs.find_draft_cost(8)
    for _ in range(1000):
        costs.observe(8, 0, PLAIN)
    assert costs.find_fixed_cost(8) < 0.05 * fixed and costs.find_draft_cost(8) < 0.05 * each
    costs.observe(8, 1, 1.3 * PLAIN)
    assert costs.find_fixed_cost(8) + costs.find_draft_cost(8) > 0.01, "what comes next counts more"


def test_a_step_without_drafts_is_due_now_and_then() -> None:
    costs = StepCosts()
    for _ in range(StepCosts.COMPARE_AFTER):
        assert not costs.is_comparison_due
        costs.observe(1, 2, PLAIN)
    assert costs.is_comparison_due
    costs.observe(1, 0, PLAIN)
    assert not costs.is_comparison_due


def test_most_steps_of_a_long_pause_are_not_measured() -> None:
    pause = DraftPause()
    assert not pause.skip_step(), "no pause"
    pause._num_left = 100
    num_skipped = 0
    while pause.skip_step():
        num_skipped += 1
    assert num_skipped == 100 - DraftPause.SHORTEST and pause.is_on


def run_pause(pause: DraftPause, saved: float, cost: float, num_steps: int) -> list[int]:
    """Return the lengths of the pauses if every other step has drafts with these savings and costs."""
    lengths = [0]
    for number in range(num_steps):
        was_on = pause.is_on
        has_drafts = number % 2 == 0 and not was_on
        pause.observe(saved * has_drafts, cost * has_drafts, has_drafts)
        if was_on:
            lengths[-1] += 1
        elif pause.is_on:
            lengths.append(0)
    return lengths[1:]


def test_pauses_become_longer_while_drafts_do_not_pay() -> None:
    pause = DraftPause()
    lengths = run_pause(pause, 0.1, 0.1, 3000)
    first, longest = DraftPause.SHORTEST, DraftPause.LONGEST
    assert lengths[:3] == [first, first * DraftPause.GROWTH, first * DraftPause.GROWTH**2]
    assert max(lengths) == longest and lengths.count(longest) > 1
    run_pause(pause, 0.3, 0.1, longest + DraftPause.LONGEST_TRIAL)
    assert not run_pause(pause, 0.3, 0.1, 500), "they pay"
    assert run_pause(pause, 0.0, 0.1, 200)[0] == first, "the next pause is short again"


def test_others_do_not_wait_for_little() -> None:
    assert run_pause(DraftPause(), 0.14, 0.1, 100)
    assert not run_pause(DraftPause(), 0.18, 0.1, 100)


def test_lookups_that_find_nothing_pause_too() -> None:
    """They pause if their share of a step is large enough to matter."""
    cheap, dear = DraftPause(), DraftPause()
    for _ in range(DraftPause.LONGEST_TRIAL):
        assert not dear.is_on
        cheap.observe(0.0, 0.001, False)
        dear.observe(0.0, 0.02, False)
    assert dear.is_on and not cheap.is_on
