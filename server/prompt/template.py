"""Chat messages to one prompt text, by the checkpoint's Jinja template, under the conventions of transformers.

The template runs in Jinja's immutable sandbox: it comes with a checkpoint, and checkpoints come from anywhere.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_llm.engine.errors import ModelError, OptionError
from serve_llm.engine.hub import read_json
from serve_llm.server.errors import InvalidRequest

Message = dict[str, object]
"""role, content (a string or None), and whatever else a client sent: name, tool_calls, ..."""


class ChatTemplate:
    """Raises ModelError when the source is not a template."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from None
        self._named_tokens = dict(named_tokens)

    @classmethod
    def of_request(cls, source: str, named_tokens: Mapping[str, str]) -> ChatTemplate:
        """A client's own. Raises InvalidRequest when it is not a template."""
        try:
            return cls(source, named_tokens)
        except ModelError as error:
            raise InvalidRequest(str(error), "chat_template") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        max_characters: int = sys.maxsize,
    ) -> str:
        """The prompt text, special tokens in it. Raises InvalidRequest when the template refuses the messages, or
        writes more than `max_characters`."""
        if continue_final_message:
            mark = f"continue-{secrets.token_hex(16)}"
            # The space after the mark shows whether the template trims contents.
            last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{mark} "}
            text = self._render([*messages[:-1], last], False, kwargs, max_characters)
            before, found, after = text.rpartition(mark)
            if not found:
                raise InvalidRequest("the chat template leaves out the message to be continued", "messages")
            return before if after.startswith(" ") else before.rstrip()
        return self._render(messages, add_generation_prompt, kwargs, max_characters)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        kwargs: Mapping[str, object] | None,
        max_characters: int,
    ) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **self._named_tokens,
            **(kwargs or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            written, parts = 0, []
            for part in self._template.generate(variables):
                written += len(part)
                if written > max_characters:
                    raise InvalidRequest(f"the chat template wrote more than {max_characters} characters", "messages")
                parts.append(part)
            return "".join(parts)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refused these messages: {error}", "messages") from None
        except Exception as error:  # the template's own slip (a type, a missing key) on what the client sent
            raise InvalidRequest(
                f"the chat template failed on these messages: {str(error) or type(error).__name__}", "messages"
            ) from None


def load_template(chosen: str | None, directory: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template that the user chose (a file, or the template itself), else the checkpoint's; None without either.
    Raises OptionError, ModelError."""
    if chosen is None:
        source = _checkpoint_source(directory)
        return None if source is None else ChatTemplate(source, named_tokens)
    try:
        return ChatTemplate(_chosen_source(chosen), named_tokens)
    except ModelError as error:
        raise OptionError(f"--chat-template {chosen}: {error}") from None


def _chosen_source(chosen: str) -> str:
    if "{%" in chosen or "{{" in chosen:
        return chosen
    try:
        return Path(chosen).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--chat-template {chosen}: {error.strerror}; give a file, or the template itself") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--chat-template {chosen}: {error}") from None


def _checkpoint_source(directory: Path) -> str | None:
    if (path := directory / "chat_template.jinja").is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: {error}; give another one by --chat-template") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(directory / name).get("chat_template") if (directory / name).is_file() else None
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # several by name
            by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            if isinstance(default := by_name.get("default"), str):
                return default
    return None


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks, for training, what the assistant said. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
