"""The prompts that calls of `LLM` give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_llm.server.http.errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """prompts: one, or several."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt) -> str | list[int]:
    """The text or the ids. Raises InvalidRequest."""
    if isinstance(prompt, Mapping):
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if content is None:
            raise InvalidRequest("a prompt must hold 'prompt' or 'prompt_token_ids'", "prompts")
        return parse_prompt(content)
    return prompt if isinstance(prompt, str) else [int(token_id) for token_id in prompt]
