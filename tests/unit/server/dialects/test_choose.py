"""How the dialect of the served model is chosen, and what the log says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.server.dialects.choose import choose_dialect
from serve_llm.server.dialects.dialect import Dialect, write_dialect
from serve_llm.server.dialects.selfcheck import describe_dialect
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.turn import opens_reasoning
from serve_llm.server.prompt.template import ChatTemplate
from support.chat_templates import TEMPLATES

QWEN = ChatTemplate(TEMPLATES["qwen3"].write(), {})
PLAIN = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def declare(directory: Path, template: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))


def test_sources_in_order(tmp_path: Path) -> None:
    assert choose_dialect(None, tmp_path, QWEN, ()).dialect == BUILT_IN["qwen3"]
    assert choose_dialect(None, tmp_path, PLAIN, ()).dialect is None
    assert choose_dialect(None, tmp_path, None, ()).dialect is None
    declare(tmp_path, DECLARED)
    declared = choose_dialect(None, tmp_path, QWEN, ()).dialect
    assert declared is not None and declared.calls is not None and declared.calls.open == ("<call>",)
    assert declared.reasoning is not None
    assert declared.reasoning.open == "<think>\n"  # with the whitespace of the chat template
    assert choose_dialect("llama3", tmp_path, QWEN, ()).dialect == BUILT_IN["llama3"]
    assert choose_dialect("none", tmp_path, QWEN, ()).dialect is None
    own = Dialect(name="own", reasoning=BUILT_IN["command"].reasoning)
    (tmp_path / "own.json").write_text(write_dialect(own))
    assert choose_dialect(str(tmp_path / "own.json"), tmp_path, QWEN, ()).dialect == own


def test_a_response_template_that_says_more_leaves_the_choice_to_the_chat_template(tmp_path: Path) -> None:
    declare(tmp_path, {**DECLARED, "fields": {"mood": {}}})
    chosen = choose_dialect(None, tmp_path, QWEN, ())
    assert chosen.dialect == BUILT_IN["qwen3"]
    assert "mood" in chosen.source


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "qwen3_coder"), ("{}", "name"), ('{"name": "a", "calls": {}}', "codec"), ("\xff", "malformed")],
)
def test_errors_of_the_option_name_it_and_the_key(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match="--dialect") as caught:
        choose_dialect(str(path), tmp_path, None, ())
    assert named in str(caught.value)


def test_a_directory_is_no_dialect(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="directory"):
        choose_dialect(str(tmp_path), tmp_path, None, ())


def test_added_tokens_decide_where_a_template_renders_no_calls(tmp_path: Path) -> None:
    source = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokens = ["<|tool_call_start|>", "<|tool_call_end|>"]
    assert choose_dialect(None, tmp_path, ChatTemplate(source, {}), ()).dialect is None
    found = choose_dialect(None, tmp_path, ChatTemplate(source, {}), tokens).dialect
    assert found is not None and found.name == "lfm2"
    assert found.reasoning is None  # neither the template nor its source mentions reasoning


def test_the_log_says_what_was_found_and_checked() -> None:
    good = describe_dialect(BUILT_IN["qwen3"], "--dialect", QWEN)
    assert good == "dialect: qwen3 (--dialect); reasoning <think> </think>; calls <tool_call>; check passed"
    wrong = describe_dialect(BUILT_IN["mistral"], "--dialect", QWEN)
    assert "check failed" in wrong and "<tool_call>" in wrong
    hidden = describe_dialect(BUILT_IN["qwen3"], "--dialect", PLAIN)
    assert "does not show" in hidden
    assert "tools are refused" in describe_dialect(None, "unknown to the chat template", PLAIN)
    lossy = ChatTemplate(TEMPLATES["qwen3"]._replace(content="{{ m.content }}.").write(), {})
    assert "check passed, but" in describe_dialect(BUILT_IN["qwen3"], "--dialect", lossy)


HEADER = "<|im_start|>assistant"
TURNS = [
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nSo far", True),  # continued
    ("<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n", False),
    ("<|im_start|>assistant\n<think>\na<|im_end|>\n<|im_start|>assistant\n", False),
]


@pytest.mark.parametrize(("prompt", "is_open"), TURNS)
def test_whether_the_prompt_has_opened_reasoning(prompt: str, is_open: bool) -> None:
    assert opens_reasoning(BUILT_IN["qwen3"], prompt, HEADER) is is_open
    assert not opens_reasoning(BUILT_IN["hermes"], prompt, HEADER)


def test_without_a_header_only_the_end_of_the_prompt_counts() -> None:
    assert opens_reasoning(BUILT_IN["qwen3"], "<think>\n", "")
    assert not opens_reasoning(BUILT_IN["qwen3"], "<think> is a tag. Answer: ", "")
