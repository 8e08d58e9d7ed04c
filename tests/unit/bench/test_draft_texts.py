"""Checks of the texts of `bench.speculation`."""

from __future__ import annotations

from bench.draft_texts import MAX_CHARACTERS, OTHER_FUNCTIONS, TEXTS, TUNED_ON


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
