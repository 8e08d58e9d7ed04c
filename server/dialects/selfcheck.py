"""Check a dialect against the chat template: reading and rendering again what the template writes must not change
it."""

from __future__ import annotations

from collections.abc import Iterable

from serve_llm.server.dialects.dialect import Delimiter, Dialect, get_written_form
from serve_llm.server.dialects.fingerprint import RenderedTurn, render_again, render_turns
from serve_llm.server.prompt.template import ChatTemplate

_SHOWN = 80  # characters


def check_dialect(dialect: Dialect, template: ChatTemplate) -> str:
    """Return the verdict in a few words."""
    if dialect.calls is None:
        return "calls are not known"
    rendered = list(render_turns(template))
    if not rendered:
        return "not checked, since the chat template renders no calls"
    read = next((turn for turn in rendered if turn.is_read_by(turn.parse(dialect))), None)
    if read is None:
        return f"check failed: the chat template writes {_shorten(rendered[0])}"
    again = render_again(template, read, read.parse(dialect))
    if again == read.prompt + read.text + read.end:
        return "check passed"
    return "check passed, but history is not rendered as the model writes it"


def describe_dialect(dialect: Dialect | None, source: str, template: ChatTemplate | None) -> str:
    """One line for the log. source: where the dialect comes from."""
    if dialect is None:
        return f"dialect: none ({source}); reasoning is part of the content, and tools are refused"
    parts = [f"dialect: {dialect.name} ({source})"]
    if dialect.reasoning is not None:
        parts.append(f"reasoning {_name([dialect.reasoning.open, dialect.reasoning.close])}")
    if dialect.calls is not None:
        calls = dialect.calls
        openings = [calls.section_open, calls.open]
        parts.append("calls bare" if calls.is_bare else f"calls {_name(openings)}")
        if template is None or not template.shows_tools:
            parts.append("tools are refused, since the chat template does not show them to the model")
        else:
            parts.append(check_dialect(dialect, template))
    return "; ".join(parts)


def _name(delimiters: Iterable[Delimiter]) -> str:
    return " ".join(word for form in map(get_written_form, delimiters) for word in form.split())


def _shorten(rendered: RenderedTurn) -> str:
    text = rendered.text
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
