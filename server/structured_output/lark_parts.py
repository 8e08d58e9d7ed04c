"""Check the parts of a Lark grammar in which llguidance allows more than this server does."""

from __future__ import annotations

import json
import re

from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.json_schema import prepare_schema, refuse_constant

# Texts, comments, regular expressions and special tokens are skipped. A limit on tokens cannot be enforced when tokens
# are rolled back, and the sampler sets temperatures.
_TOKEN = re.compile(
    r"""(?P<other>"(?:\\.|[^"\\])*"|(?://|\#)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>)
    |%json\b\s*(?P<schema>)
    |\b(?P<attribute>max_tokens|temperature)\s*=""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def prepare_lark(lark: str) -> str:
    """Return a Lark grammar with JSON schemas that llguidance enforces exactly. Raises GrammarError."""
    pieces = []
    position = 0
    while found := _TOKEN.search(lark, position):
        pieces.append(lark[position : found.end()])
        position = found.end()
        if found["attribute"]:
            raise GrammarError(f"the attribute {found['attribute']} is not supported")
        if found["schema"] is None:
            continue
        try:
            schema, position = _DECODER.raw_decode(lark, position)
            prepared = prepare_schema(schema, closed=False)
            pieces.append(json.dumps(prepared, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"%json is followed by malformed JSON: {error}") from None
    return "".join(pieces) + lark[position:]
