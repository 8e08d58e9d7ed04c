"""Fixed texts in Lark grammars."""

from __future__ import annotations

import json


def quote_lark(text: str) -> str:
    """Return a text as a literal of llguidance's Lark, which allows no control characters in it, including U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
