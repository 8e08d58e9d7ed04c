from __future__ import annotations

from collections import Counter

import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.policy import TokenBudget, WaitingQueue
from serve_llm.engine.scheduler.sequence import Sequence


def waiting(*specs: tuple[int, int]) -> tuple[WaitingQueue, list[Sequence]]:
    """Return a queue with a sequence for each (tenant, priority), in this order of arrival."""
    queue, sequences = WaitingQueue(), []
    for number, (tenant, priority) in enumerate(specs):
        request = EngineCoreRequest(
            id=number, prompt_ids=[1], sampling=Sampling(max_tokens=1, seed=0), tenant=tenant, priority=priority
        )
        sequences.append(Sequence(request, (), number, 0.0))
        queue.add(sequences[-1])
    return queue, sequences


def test_of_one_tenant_the_first_to_come_goes_first_and_priority_before_all() -> None:
    queue, _ = waiting((0, 0), (0, 1), (0, 0), (5, -1))
    assert [sequence.request.id for sequence in queue] == [3, 0, 2, 1]
    assert len(queue) == 4


def test_tenants_take_turns_by_tokens_served() -> None:
    queue, _ = waiting(*[(0, 0)] * 40, *[(1, 0)] * 40)
    served: Counter[int] = Counter()
    for sequence in queue:
        queue.admit(sequence, 10 if sequence.request.tenant else 30)
        served[sequence.request.tenant] += 10 if sequence.request.tenant else 30
        assert abs(served[0] - served[1]) <= 30 or len(queue) < 40
    assert len(queue) == 0


def test_who_stayed_away_gets_no_credit_and_who_generates_much_pays_for_it() -> None:
    queue, sequences = waiting(*[(0, 0)] * 6)
    for sequence in sequences[:3]:
        queue.admit(sequence, 100)
    for number in range(6, 12):
        request = EngineCoreRequest(id=number, prompt_ids=[1], sampling=Sampling(max_tokens=1, seed=0), tenant=1)
        queue.add(Sequence(request, (), number, 0.0))
    order = []
    for sequence in queue:
        queue.admit(sequence, 100)
        order.append(sequence.request.tenant)
    assert order == [1, 0, 1, 0, 1, 0, 1, 1, 1]
    queue, sequences = waiting((0, 0), (1, 0))
    queue.charge(sequences[0], 1)
    assert [sequence.request.tenant for sequence in queue] == [1, 0]
    queue.remove(sequences[1])
    assert list(queue) == sequences[:1]


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
    slow = TokenBudget(2048, 0.15)
    slow.observe(64, 10.0)
    assert slow.next(200) == 200 + TokenBudget.SMALLEST, "each running sequence gets its token"
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
    tokens = [budget.next(0, waiting) for waiting in (0, 1, 4, 6, 8, 12, 1000)]
    assert tokens == pytest.approx([600, 600, 600, 900, 1200, 1800, 2048], abs=1)


def test_batches_fill_pauses_with_short_steps() -> None:
    budget = TokenBudget(2048, 0.15)
    for _ in range(50):
        budget.observe(600, 600 / 4000)
    assert budget.next(200, in_pause=True) == pytest.approx(100, abs=1)
    slow = TokenBudget(2048, 0.15)
    slow.observe(64, 10.0)
    assert slow.next(64, in_pause=True) == TokenBudget.FEW
    assert TokenBudget(8192, None).next(64, in_pause=True) == 8192


@pytest.mark.parametrize(
    ("target", "decode_seconds", "tokens"),
    [(0.15, 0.010, 40), (0.15, 0.100, 100), (0.15, 0.001, 16), (None, 0.100, 400), (None, 0.001, 256)],
)
def test_steps_of_batches_in_a_pause_are_as_long_as_decode_steps_of_others(
    target: float | None, decode_seconds: float, tokens: int
) -> None:
    budget = TokenBudget(2048, target)
    for _ in range(50):
        budget.observe(600, 600 / 4000)
        budget.observe_decode(decode_seconds)
    assert budget.next(200, in_pause=True) == pytest.approx(tokens, abs=1)
    assert budget.next() == (2048 if target is None else 600)  # without batches
    for _ in range(50):
        budget.observe_in_pause(40, 0.020)  # half as fast
    assert budget.next(200, in_pause=True) == pytest.approx(max(tokens // 2, 16 if target else 256), abs=1)


def test_a_burst_is_worked_off_in_steps_as_large_as_its_first() -> None:
    budget = TokenBudget(8192, 0.15)
    for _ in range(50):
        budget.observe(600, 600 / 4000)
    tokens = [budget.next(0, waiting) for waiting in (8, 5, 1, 12, 2, 0, 2, 1000, 1, 0, 0)]
    assert tokens == pytest.approx([1200, 1200, 1200, 1800, 1800, 600, 600, 2400, 2400, 600, 600], abs=2)
