"""Custom tools, which take plain text. The model sees them as functions with one argument."""

from __future__ import annotations

import json
import re

from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.lark_regex import translate_lark
from serve_llm.server.structured_output.pattern import closes_unopened_group

CUSTOM_INPUT = "input"
"""The one argument of a function that represents a custom tool."""

_OPEN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
# Characters of a JSON string that are complete regardless of what follows. A high surrogate needs its low one.
_WHOLE = re.compile(
    r"""(?:[^"\\]
    |\\[^u]
    |\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*""",
    re.VERBOSE,
)


def describe_input(syntax: str | None = None, definition: str = "") -> dict[str, object]:
    """The schema of a custom tool's arguments. syntax: lark, regex, or None for any text. Raises LarkError,
    GrammarError."""
    text: dict[str, object] = {"type": "string"}
    if syntax == "regex":
        if closes_unopened_group(definition):
            raise GrammarError("regex closes a group that it does not open")
        text["pattern"] = f"^(?:{definition})$"
    elif syntax == "lark":
        text["pattern"] = f"^(?:{translate_lark(definition)})$"
        text["description"] = f"A text of this Lark grammar:\n{definition}"
    return wrap_input(text)


def wrap_input(text: dict[str, object]) -> dict[str, object]:
    """text: the schema of the input."""
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


class CustomInputReader:
    """Extracts the text of one call from its arguments while they are generated.

    Arguments that do not begin like those of a custom tool are passed on unchanged.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False  # whether the text has begun
        self._is_closed = False

    def push(self, arguments: str) -> str:
        """Add more of the arguments' JSON. Returns the text that is now complete."""
        if self._is_closed:
            return ""
        self._buffer += arguments
        if not self._is_text:
            opening = _OPEN.match(self._buffer)
            if opening is None:
                return ""
            self._is_text = True
            self._buffer = self._buffer[opening.end() :]
        whole = _WHOLE.match(self._buffer)
        assert whole is not None
        self._buffer = self._buffer[whole.end() :]
        self._is_closed = self._buffer.startswith('"')
        return _decode(whole[0])

    def finish(self) -> str:
        """Return the remaining text, once the call has ended or was truncated."""
        rest = "" if self._is_text else self._buffer
        self._is_closed = True
        self._buffer = ""
        return rest


def read_custom_input(arguments: str) -> str:
    """The text of a whole call."""
    reader = CustomInputReader()
    return reader.push(arguments) + reader.finish()


def _decode(characters: str) -> str:
    """Decode a JSON string's characters. Lone surrogates, which UTF-8 cannot represent, become U+FFFD."""
    text: str = json.loads(f'"{characters}"', strict=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
