"""Checks of the texts of `bench.speculation`."""

from __future__ import annotations

from pathlib import Path

from bench.draft_texts import MAX_CHARACTERS, OTHER_FUNCTIONS, REQUESTS, TEXTS, TUNED_ON, make_workloads
from serve_llm.common.hub import resolve_model


def test_other_texts_are_not_those_that_rules_were_tuned_on() -> None:
    assert not set(TUNED_ON) & set(OTHER_FUNCTIONS)
    tuned, others = (
        {prompt for task in make().values() for prompt in task.prompts} for make in (TEXTS["tuned"], TEXTS["other"])
    )
    assert tuned and others and not tuned & others
    assert all(prompt and len(prompt) < 3 * MAX_CHARACTERS for prompt in tuned | others)


def test_one_of_eight_chats_copies() -> None:
    tasks = TEXTS["other"]()
    assert len(tasks["chat"].prompts) == 8
    assert len(set(tasks["chat"].prompts) & set(tasks["edit"].prompts)) == 1


def test_each_turn_sends_other_texts_to_a_server() -> None:
    found = make_workloads("other", Path(resolve_model("demo")) / "tokenizer.json")
    assert "code" in found and "noise" not in found, "noise needs biases of single ids"
    workload = found["edit"]
    turns = [workload.prompts(turn, ()) for turn in range(3)]
    assert {len(prompts) for prompts in turns} == {REQUESTS}
    assert len({tuple(prompt) for prompts in turns for prompt in prompts}) == 3 * REQUESTS
    assert found["edit"].temperature == 0.0 < found["code"].temperature
    assert all(len(prompt) + workload.output_tokens <= 2048 for prompts in turns for prompt in prompts)
