"""Render chat messages into a prompt with the checkpoint's Jinja template, following the conventions of transformers.

Templates run in Jinja's immutable sandbox, because checkpoints come from untrusted sources.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NoReturn, get_args

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import read_json
from serve_llm.server.http.errors import InvalidRequest

Message = dict[str, object]
"""role, content (a string, None, or a list of parts {"type": "text", "text": ...}), and any other fields that the
client sent: name, tool_calls, ..."""

PROBE_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Look a key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The key."}},
            "required": ["key"],
        },
    },
}
"""A tool for probing templates."""

ContentFormat = Literal["auto", "string", "openai"]
"""What contents templates get: texts, lists of parts, or what the template takes. vLLM's names."""
CONTENT_FORMATS: tuple[str, ...] = get_args(ContentFormat)

_PROBE_CONTENT = "probe content"


class ChatTemplate:
    """Raises ModelError when a source is not a valid template. tool_source: the template for requests with tools."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from None
        self._named_tokens = dict(named_tokens)
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        tree = environment.parse(self.tool_source)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.message_fields = _list_names(tree)

    @classmethod
    def from_request(cls, source: str, named_tokens: Mapping[str, str]) -> ChatTemplate:
        """Compile a template from a client. Raises InvalidRequest if it is invalid."""
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
        tools: Sequence[Mapping[str, object]] = (),
        kwargs: Mapping[str, object] | None = None,
        max_characters: int = sys.maxsize,
        content_format: ContentFormat = "auto",
    ) -> str:
        """The prompt text, including special tokens.

        tools: as in the request, {"type": "function", "function": {...}}. Arguments of calls in messages are objects.
        Raises InvalidRequest when the template rejects the messages or writes more than `max_characters`.
        """
        if tools:
            kwargs = {**(kwargs or {}), "tools": tools}
            if "python_tools" not in kwargs:  # SmolLM3 uses one of two other names instead of `tools`
                kwargs.setdefault("xml_tools", tools)
        if any(message.get("tool_calls") for message in messages) and self.wants_argument_text:
            messages = [_write_arguments(message) for message in messages]
        messages = [self._choose_content(message, content_format) for message in messages]
        if continue_final_message:
            mark = f"continue-{secrets.token_hex(16)}"
            # The space after the mark shows whether the template strips contents.
            last = {**messages[-1], "content": _append_text(messages[-1].get("content"), f"{mark} ")}
            text = self._render([*messages[:-1], last], False, kwargs, max_characters)
            before, has_mark, after = text.rpartition(mark)
            if not has_mark:
                raise InvalidRequest("the chat template does not render the message to be continued", "messages")
            return before if after.startswith(" ") else before.rstrip()
        return self._render(messages, add_generation_prompt, kwargs, max_characters)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether tools become part of the prompt. Otherwise, the model cannot know about them."""
        user: Message = {"role": "user", "content": "?"}
        system: Message = {"role": "system", "content": "!"}
        for messages in ([user], [system, user]):
            with contextlib.suppress(InvalidRequest):
                if "probe_tool" in self.render(messages, tools=[PROBE_TOOL]):
                    return True
        return False

    @functools.cached_property
    def wants_argument_text(self) -> bool:
        """Whether the template requires the arguments of calls as JSON text instead of an object."""
        arguments = {"key": "value"}
        as_text = self._try_arguments(json.dumps(arguments))
        as_object = self._try_arguments(arguments)
        if as_text is None or as_object is None:
            return as_text is not None
        return repr(arguments) in as_object and json.dumps(arguments) in as_text

    @functools.cached_property
    def takes_parts_only(self) -> bool:
        """Whether contents must be lists of parts, because a text would be dropped or iterated character by
        character."""
        part = {"type": "text", "text": _PROBE_CONTENT}
        return not self._shows_content(_PROBE_CONTENT) and self._shows_content([part])

    def _shows_content(self, content: object) -> bool:
        """Whether a user's content appears unchanged in the prompt."""
        with contextlib.suppress(InvalidRequest):
            found = self._render([{"role": "user", "content": content}], True, None, sys.maxsize)
            return _PROBE_CONTENT in found and "'text'" not in found and '"text"' not in found
        return False

    def _choose_content(self, message: Message, content_format: ContentFormat) -> Message:
        """Convert the message's content to this form. "auto": parts are joined as lines, unless the template reads more
        than their text."""
        content = message.get("content")
        if isinstance(content, list) and content_format != "openai":
            fields = {name for part in content for name in part} - {"type", "text"}
            if content_format == "string" or fields.isdisjoint(self.message_fields):
                content = join_parts(content)
        if isinstance(content, str) and (
            self.takes_parts_only if content_format == "auto" else content_format == "openai"
        ):
            content = [{"type": "text", "text": content}]
        return message if content is message.get("content") else {**message, "content": content}

    def _try_arguments(self, arguments: object) -> str | None:
        """Render a prompt with a call. Returns None if the template rejects it."""
        call = {"id": "call00000", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        with contextlib.suppress(InvalidRequest):
            return self._render(messages, False, {"tools": [PROBE_TOOL]}, sys.maxsize)
        return None

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
        template = self._tool_template if variables["tools"] else self._template
        try:
            written = 0
            parts = []
            for part in template.generate(variables):
                written += len(part)
                if written > max_characters:
                    raise InvalidRequest(f"the chat template wrote more than {max_characters} characters", "messages")
                parts.append(part)
            return "".join(parts)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refused these messages: {error}", "messages") from None
        except Exception as error:  # a type error or missing key in the template
            raise InvalidRequest(
                f"the chat template failed on these messages: {str(error) or type(error).__name__}", "messages"
            ) from None


def load_template(chosen: str | None, directory: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of --chat-template (a file, or the template itself), else the checkpoint's, else None.
    Raises OptionError, ModelError."""
    if chosen is None:
        sources = _read_checkpoint_sources(directory)
        source = sources.get("default")
        if source is None:
            return None
        return ChatTemplate(source, named_tokens, sources.get("tool_use"))
    try:
        return ChatTemplate(_chosen_source(chosen), named_tokens)
    except ModelError as error:
        raise OptionError(f"--chat-template {chosen}: {error}") from None


def _chosen_source(chosen: str) -> str:
    if "{%" in chosen or "{{" in chosen:
        return chosen
    try:
        return Path(chosen).expanduser().read_text(encoding="utf-8-sig")  # editors may write a byte order mark
    except OSError as error:
        raise OptionError(f"--chat-template {chosen}: {error.strerror}; give a file, or the template itself") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--chat-template {chosen}: {error}") from None


def _read_checkpoint_sources(directory: Path) -> dict[str, str]:
    """The templates of a checkpoint by name: `default`, and others such as `tool_use`. Raises ModelError."""
    sources = _read_default_sources(directory)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_template(path)
    return sources


def _read_default_sources(directory: Path) -> dict[str, str]:
    if (path := directory / "chat_template.jinja").is_file():
        return {"default": _read_template(path)}
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(directory / name).get("chat_template") if (directory / name).is_file() else None
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            return {key: value for key, value in by_name.items() if isinstance(key, str) and isinstance(value, str)}
    return {}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: {error}; give another one with --chat-template") from None


def join_parts(parts: Sequence[Mapping[str, str]]) -> str:
    """The texts of the parts of a content, as lines."""
    return "\n".join(part["text"] for part in parts)


def _append_text(content: object, text: str) -> object:
    """The content with this text at its end."""
    if not isinstance(content, list):
        return f"{content or ''}{text}"
    if not content:
        return [{"type": "text", "text": text}]
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + text}]


def _write_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": written}


def _list_names(tree: nodes.Template) -> frozenset[str]:
    """Collect the names of attributes and keys that a template may look up, and all other constant texts."""
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return frozenset(attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; render its content."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
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
    """Plain JSON, because Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
