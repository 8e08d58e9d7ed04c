"""Prompts that Python callers may pass, and error messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from serve_llm import LLM
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.offline_prompts import ParsedPrompt, parse_chats, parse_prompts
from serve_llm.server.response.outputs import ClassificationOutput, CompletionOutput, EmbeddingOutput

TEXT = ParsedPrompt("a")
IDS = ParsedPrompt([1, 2])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: "a", [TEXT]),
        (lambda: ["a", "a"], [TEXT, TEXT]),
        (lambda: ("a" for _ in range(2)), [TEXT, TEXT]),
        (lambda: dict.fromkeys("a"), None),  # a dict is one prompt
        (lambda: [1, 2], [IDS]),
        (lambda: iter([1, 2]), [IDS]),
        (lambda: (1, 2.0), [IDS]),
        (lambda: np.array([1, 2]), [IDS]),
        (lambda: np.array([[1, 2], [1, 2]]), [IDS, IDS]),
        (lambda: [[1, 2], "a"], [IDS, TEXT]),
        (lambda: [np.array([1, 2])], [IDS]),
        (list, []),
        (lambda: {"prompt": "a"}, [TEXT]),
        (lambda: {"prompt": [1, 2]}, [IDS]),
        (lambda: {"prompt": "a", "prompt_token_ids": [1, 2]}, [IDS]),
        (lambda: {"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}}, [TEXT]),
        (lambda: [{"prompt": "a", "cache_salt": "s"}], [ParsedPrompt("a", "s")]),
    ],
)
def test_forms(make: Callable[[], object], expected: list[ParsedPrompt] | None) -> None:
    if expected is None:
        with pytest.raises(InvalidRequest):
            parse_prompts(make())  # type: ignore[arg-type]
    else:
        assert parse_prompts(make()) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be a text, token ids, a dict, or several of these, not 5"),
        (None, "prompts must be"),
        (b"a", "prompts must be"),
        (["a", None], r"prompts\[1\] must be a text, token ids or a dict, not None"),
        ([1, None], "prompts must be an integer, not None"),
        ([[1.5]], r"prompts\[0\] must be an integer, not 1.5"),
        ({}, "prompts must hold 'prompt' or 'prompt_token_ids'"),
        ([{"text": "a"}], r"prompts\[0\]: unknown key 'text'; known are prompt, prompt_token_ids, cache_salt"),
        ({"prompt": {"prompt": "a"}}, "must hold"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be 1 to 256 characters long"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a text, not 5"),
    ],
)
def test_mistakes(prompts: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_prompts(prompts)  # type: ignore[arg-type]


def test_images_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="prompts: multi_modal_data is not supported; models here take text only"):
        parse_prompts({"prompt": "a", "multi_modal_data": {"image": object()}})


def test_conversations() -> None:
    message = {"role": "user", "content": "a"}
    assert parse_chats(iter([message])) == [[message]]
    assert parse_chats([[message], (message, message)]) == [[message], [message, message]]
    assert parse_chats([]) == [[]]
    for wrong in ("a", message, 3, None, [3], ["a"], [[message], "a"], [[message], message], [message, [message]]):
        with pytest.raises(InvalidRequest, match="messages must be"):
            parse_chats(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("beam_search", "n with a temperature"),
        ("encode", "embed"),
        ("sleep", "close"),
        ("shutdown", "close"),
        ("enqueue", "generate runs all prompts"),
        ("set_tokenizer", "keyword tokenizer"),
    ],
)
def test_methods_of_vllm_are_explained(name: str, hint: str) -> None:
    llm = LLM.__new__(LLM)
    assert not hasattr(llm, name) and not hasattr(llm, "nonsense")
    with pytest.raises(AttributeError, match=f"LLM has no {name}.*{hint}"):
        getattr(llm, name)


def test_results_have_the_properties_of_vllms() -> None:
    assert EmbeddingOutput([1.0, 2.0]).hidden_size == 2 and ClassificationOutput([0.5, 0.5], "a").num_classes == 2
    assert CompletionOutput(0, "a", [1], "stop", None, None, None).finished()
