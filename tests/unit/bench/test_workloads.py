import itertools
import math

import pytest

from bench.workloads import WORKLOADS, percentile, poisson_arrivals

IDS = range(300, 31000)


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_have_the_lengths_that_the_table_says(name: str) -> None:
    workload = WORKLOADS[name]
    prompts = workload.prompts(0, IDS)
    assert len(prompts) == workload.requests >= workload.streams
    assert {len(prompt) for prompt in prompts} == {workload.shared_tokens + workload.prompt_tokens}
    assert all(token_id in IDS for prompt in prompts for token_id in prompt)


def test_turns_share_the_shared_part_and_nothing_else() -> None:
    workload = WORKLOADS["W4"]
    prompts = [*workload.prompts(0, IDS), *workload.prompts(1, IDS)]
    shared = workload.shared(IDS)
    assert {tuple(prompt[:1024]) for prompt in prompts} == {tuple(shared)}
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == len(prompts)
    assert workload.prompts(0, IDS) == prompts[:16], "the same for every server"


def test_arrivals_are_in_order_at_about_the_rate() -> None:
    times = poisson_arrivals(4.0, 4001, seed=7)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1), "exponential gaps deviate by their mean"
    assert times == poisson_arrivals(4.0, 4001, seed=7) != poisson_arrivals(4.0, 4001, seed=8)


def test_percentiles_lie_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.5, pytest.approx(3.97), 4.0]
    assert percentile([5.0], 0.99) == 5.0
    assert math.isnan(percentile([], 0.5))
