"""Prompts as Python callers give them: texts, token ids, dicts or conversations, one or several."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from serve_llm.server.field_types import to_ids
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.schema.common import check_cache_salt

Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_UNSUPPORTED = {
    "multi_modal_data": "models here take text only, no images, audio or video",
    "multi_modal_uuids": "models here take text only, no images, audio or video",
    "mm_processor_kwargs": "models here take text only, no images, audio or video",
    "prompt_embeds": "give a text or token ids",
    "encoder_prompt": "encoder-decoder models are not supported",
    "decoder_prompt": "encoder-decoder models are not supported",
}


class ParsedPrompt(NamedTuple):
    content: str | list[int]
    cache_salt: str | None = None

    def to_body(self) -> dict[str, object]:
        """Fields of /v1/embeddings."""
        return {"input": self.content, "cache_salt": self.cache_salt}


def parse_prompts(prompts: Prompt | Iterable[Prompt]) -> list[ParsedPrompt]:
    """prompts: one, or any iterable of several. Raises InvalidRequest."""
    prompts = _to_lists(prompts)
    if isinstance(prompts, str | Mapping):
        return [_parse(prompts, "prompts")]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be a text, token ids, a dict, or several of these, not {prompts!r:.100}")
    items = list(cast("Iterable[Prompt]", prompts))
    if items and isinstance(items[0], numbers.Number):
        return [ParsedPrompt(to_ids(items, "prompts"))]
    return [_parse(_to_lists(item), f"prompts[{index}]") for index, item in enumerate(items)]


def parse_chats(messages: Iterable[Any]) -> list[list[dict[str, Any]]]:
    """messages: of one conversation, or of several; any iterables. Raises InvalidRequest."""
    problem = "messages must be a conversation, that is, a list of dicts, or a list of conversations"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"{problem}, not {messages!r:.100}", "messages")
    given = list(messages)
    conversations = [given] if not given or isinstance(given[0], Mapping) else given
    parsed = []
    for conversation in conversations:
        is_listed = isinstance(conversation, Iterable) and not isinstance(conversation, str | bytes | Mapping)
        found = list(conversation) if is_listed else [conversation]
        if not is_listed or not all(isinstance(message, Mapping) for message in found):
            raise InvalidRequest(f"{problem}, not {conversation!r:.100}", "messages")
        parsed.append([dict(message) for message in found])
    return parsed


def set_priorities(requests: Sequence[TextRequest], priorities: Sequence[int]) -> None:
    """priorities: one for each request. Raises InvalidRequest."""
    if len(priorities) != len(requests):
        raise InvalidRequest(f"{len(priorities)} priorities for {len(requests)} prompts", "priority")
    for request, priority in zip(requests, priorities, strict=True):
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", "priority")
        request.priority = priority


def _parse(prompt: Any, place: str) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise InvalidRequest(f"{place} must be a text, token ids or a dict, not {prompt!r:.100}", "prompts")
        return ParsedPrompt(to_ids(prompt, place))
    for key, value in prompt.items():
        if key in _UNSUPPORTED and value:
            raise Unsupported(f"{place}: {key} is not supported; {_UNSUPPORTED[key]}", f"prompts.{key}")
        if key not in _KEYS and key not in _UNSUPPORTED and value is not None:
            raise InvalidRequest(f"{place}: unknown key {key!r}; known are {', '.join(_KEYS)}", "prompts")
    content = prompt.get("prompt_token_ids")
    if content is None:
        content = prompt.get("prompt")
    if content is None or isinstance(content, Mapping):
        raise InvalidRequest(f"{place} must hold 'prompt' or 'prompt_token_ids'", "prompts")
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequest(f"{place}: cache_salt must be a text, not {salt!r:.100}", "prompts.cache_salt")
    check_cache_salt(salt)
    return _parse(_to_lists(content), place)._replace(cache_salt=salt)


def _to_lists(value: Any) -> Any:
    """Arrays, tensors and series as lists."""
    return value.tolist() if hasattr(value, "tolist") else value
