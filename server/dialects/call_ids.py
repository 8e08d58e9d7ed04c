"""Generate ids of calls by the model's own rule, since its template may show them to it."""

from __future__ import annotations

import random
import string

from serve_llm.server.dialects.dialect import IdRule

_ALPHANUMERIC = string.ascii_letters + string.digits


class CallIdMaker:
    """Makes the ids of one choice. Ids within a turn differ."""

    def __init__(self, generator: random.Random, num_previous_calls: int) -> None:
        """num_previous_calls: calls in the conversation before this turn."""
        self._generator = generator
        self._num_previous_calls = num_previous_calls
        self._used: set[str] = set()

    def make(self, rule: IdRule, name: str, written_id: str, index: int) -> str:
        """Make the id of call `index` of the turn. written_id: the id that the model wrote; "" if it wrote none."""
        call_id = self._make(rule, name, written_id, index)
        self._used.add(call_id)
        return call_id

    def _make(self, rule: IdRule, name: str, written_id: str, index: int) -> str:
        if rule == "kimi":
            written = f"functions.{name}:{written_id}"
            if written_id.isdecimal() and written not in self._used:
                return written
            return f"functions.{name}:{self._num_previous_calls + index}"
        if rule == "mistral":
            is_valid = len(written_id) == 9 and written_id.isascii() and written_id.isalnum()
            return written_id if is_valid and written_id not in self._used else self._draw(9)
        return "call_" + self._draw(24)

    def _draw(self, length: int) -> str:
        return "".join(self._generator.choices(_ALPHANUMERIC, k=length))
