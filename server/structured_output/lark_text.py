"""Fixed texts in Lark grammars."""

from __future__ import annotations

import json


def quote_lark(text: str) -> str:
    """A text as a literal of llguidance's Lark, which allows no control character in one, U+007F among them."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
