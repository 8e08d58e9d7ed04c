"""Tools for tests: a chat template that shows them, a dialect for calls, and requests with both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from serve_llm.server.dialects.dialect import CallFormat, Dialect, JsonCodec, ReasoningFormat, write_dialect
from serve_llm.server.dialects.fingerprint import find_header
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.template import ChatTemplate

DIALECT = Dialect(
    name="json-tag",
    reasoning=ReasoningFormat(open="<think>\n", close="\n</think>\n\n"),
    calls=CallFormat(
        codec=JsonCodec(name_key="name"), open="<tool_call>\n", close="\n</tool_call>", separator="\n", lead="\n"
    ),
    trims_content=True,
)

# Thinking is on unless `enable_thinking` says otherwise; `opens` writes the opening of the reasoning into the prompt.
TEMPLATE = """
{%- if tools %}{{ '<|system|>\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- elif opens %}{{ '<think>\n' }}{% endif %}
{%- endif %}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def write_call(name: str, **arguments: object) -> str:
    """Return a call as a model with DIALECT writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_files(folder: Path) -> dict[str, str]:
    """Write files with the template and the dialect. Returns them by option."""
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "dialect.json").write_text(write_dialect(DIALECT))
    return {"--chat-template": str(folder / "template.jinja"), "--dialect": str(folder / "dialect.json")}


def with_strict_roles(model: ServedModel) -> ServedModel:
    """A model like that of `with_tools`, whose template refuses two messages of one role after each other."""
    check = (
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    return with_tools(model, template=check + TEMPLATE)


def with_tools(model: ServedModel, dialect: Dialect | None = DIALECT, template: str = TEMPLATE) -> ServedModel:
    chat_template = ChatTemplate(template, model.tokenizer.named_tokens)
    return replace(model, dialect=dialect, template=chat_template, turn_header=find_header(chat_template))
