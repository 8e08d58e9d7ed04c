"""The JSON text of a request body, and what to say about one that cannot be read."""

from __future__ import annotations

import codecs
import re
from typing import Any

from pydantic_core import from_json

from serve_llm.common.nesting import nests_deeper
from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, TooLarge

# A pair of escaped surrogates, a lone one, or another escape.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def drop_mark(content: bytes) -> bytes:
    """Remove the byte order mark that Windows tools write before UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)


def read_fields(content: bytes, limits: Limits) -> dict[str, Any]:
    """Read the JSON object in a body. Raises InvalidRequest, TooLarge."""
    if sum(map(content.count, b",[{")) > limits.json_values:
        raise TooLarge(f"the body holds more than {limits.json_values} values")
    try:
        values = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(_explain_encoding(content) or f"the body is malformed JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("the body must be a JSON object")
    may_nest = content.count(b"{") + content.count(b"[") > limits.json_depth
    if may_nest and nests_deeper(values, limits.json_depth):
        raise InvalidRequest(f"the body nests more than {limits.json_depth} objects and lists")
    return values


def _explain_encoding(content: bytes) -> str | None:
    """Explain why the text itself is invalid; None if it is valid."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        return "the body must be in UTF-8; it looks like UTF-16 or UTF-32"
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"the body must be in UTF-8: the byte 0x{content[error.start]:02x} at offset {error.start} is not"
    for match in _ESCAPE.finditer(content):
        if match[1] is not None:
            return (
                f"the body holds a lone surrogate, {match[1].decode()} at offset {match.start()}: half of a character, "
                "which no text can have; was a text cut inside an emoji?"
            )
    return None
