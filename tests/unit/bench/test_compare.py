import dataclasses
import math

import pytest

from bench.compare import Comparison, best_peer, find_workloads, parse, ratios, spread, table
from bench.load import Result

BASE = Result(
    seconds=1.0,
    requests=1,
    output_tokens=1,
    short=0,
    errors=0,
    first_error=None,
    tokens_per_second=0.0,
    ttft_p50=0.1,
    ttft_p99=0.1,
    itl_p50=0.01,
    itl_p99=0.01,
    client_cores=0.0,
)


def turns(*speeds: float, ttft: float = 0.1) -> list[Result]:
    return [dataclasses.replace(BASE, tokens_per_second=speed, ttft_p50=ttft) for speed in speeds]


def test_ratios_are_of_one_turn_each() -> None:
    assert ratios([3.0, 4.0], [2.0, 1.0]) == [1.5, 4.0]
    assert math.isnan(ratios([1.0], [0.0])[0])
    assert spread([3.0, 1.0, 2.0], "{:.1f}") == "2.0 (1.0-3.0)" and spread([1.0], "{:.1f}") == "1.0"


def test_the_best_of_the_others() -> None:
    found = {"ours": [9.0], "a": [2.0, 8.0, 2.0], "b": [3.0]}
    assert best_peer(found, "ours", more_is_better=True) == "b"
    assert best_peer(found, "ours", more_is_better=False) == "a"
    assert best_peer({"ours": [1.0]}, "ours", more_is_better=True) is None


def test_the_table_names_ratios_to_the_first_and_to_the_best() -> None:
    text = "\n".join(table("W2", {"ours": turns(30, 20), "a": turns(10, 10, ttft=0.05), "b": turns(20, 20, ttft=0.2)}))
    assert "25.0 (20.0-30.0)" in text
    assert "output tokens/s: ours to b, the best of the others: 1.25 (1.00-1.50)" in text
    assert "first token, ms: ours to a, the best of the others: 2.00" in text
    wrong = [dataclasses.replace(BASE, errors=2, first_error="status 500", short=1)]
    assert "ours: 2 errors (status 500), 1 replies too short" in "\n".join(table("W1", {"ours": wrong}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "at least one SERVER"),
        (["a=http://x", "a=http://y"], "a name of its own"),
        (["serve-llm", "--turns", "0"], "at least 1"),
        (["serve-llm", "--poisson", "0.6", "--workloads", "W1"], "W2 among the workloads"),
        (["serve-llm", "--workloads", "W1:0"], "at least 1"),
        (["serve-llm", "--workloads", "W9"], "'W9' is not known; there are W1, W2, W3, W4, tiny"),
        (["serve-llm", "--texts", "tuned", "--workloads", "W1"], "'W1' is not known; there are edit, ordinary, quote"),
        (["serve-llm", "--texts", "tuned", "--peer", "transformers=/bin/true,/tmp"], "accept token ids"),
        (["nonsense"], "neither serve-llm nor NAME=URL"),
        (["serve-llm", "--peer", "triton=/bin/true"], "'triton' is not known; there are vllm, openvino"),
        (["serve-llm", "--peer", "vllm=/nowhere/python"], "there is no program '/nowhere/python'"),
        (["serve-llm", "--peer", "vllm=/bin/true,/nowhere/model"], "there is no model '/nowhere/model'"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*arguments, "--model", "demo"])
    assert words in capsys.readouterr().err


def test_workloads_are_the_usual_ones_or_those_of_texts() -> None:
    def names(texts: str | None, chosen: list[str] | None) -> list[str]:
        return [workload.name for workload, _ in find_workloads(texts, chosen, "demo", 2)]

    assert names(None, None) == ["W1", "W2", "W3", "W4"]
    assert names("tuned", None) == ["edit", "quote", "ordinary"]
    assert names("other", ["prose"]) == ["prose"]


def test_a_workload_may_have_fewer_turns() -> None:
    found = find_workloads(None, ["W1", "W3:1"], "demo", turns=3)
    assert [turns for _, turns in found] == [3, 1]
    comparison = Comparison([], found, None, [], {})
    assert [comparison.due(turn) for turn in range(4)] == [["W1", "W3"], ["W1"], ["W1"], []]
    with_arrivals = Comparison([], find_workloads(None, ["W2:1"], "demo", 3), 0.5, [], {})
    assert with_arrivals.due(0) == ["W2", "W2 at 0.5"] and not with_arrivals.due(1)
