"""Values by patterns of module names: PEFT's rank_pattern and alpha_pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from serve_llm.common.errors import AdapterError

MAX_PATTERN_LENGTH = 4096  # characters
_PLAIN_NAME = re.compile(r"[\w.]+")

Value = TypeVar("Value")


class ModulePatterns(Generic[Value]):
    """As in PEFT, the first pattern wins that matches a module's whole name, or its end after a dot.

    A pattern is a regular expression, but usually a plain name. Plain names are looked up instead of matched, so that a
    file may name every module; in them, a dot is a dot. A regular expression may take unlimited time: the process that
    checks an adapter limits it (`engine.lora.check`).
    """

    def __init__(self, key: str, values: Mapping[str, Value]) -> None:
        """key: names the patterns in errors. Raises AdapterError for one that is too long or invalid."""
        self._values = list(values.values())
        self._names: dict[str, int] = {}  # plain name -> its index
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for index, pattern in enumerate(values):
            if _PLAIN_NAME.fullmatch(pattern):
                self._names[pattern] = index
            else:
                self._expressions.append((index, _compile(key, pattern)))

    def find(self, module: str, default: Value) -> Value:
        """Return the value of a module. module: its whole name."""
        if not self._values:
            return default
        parts = module.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        named = min((self._names[end] for end in ends if end in self._names), default=len(self._values))
        for index, expression in self._expressions:
            if index > named:
                break
            if expression.match(module):
                return self._values[index]
        return self._values[named] if named < len(self._values) else default


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise AdapterError(f"{key}: a pattern has {len(pattern):,} characters, more than {MAX_PATTERN_LENGTH:,}")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{key}: {pattern[:100]!r} is not a regular expression: {error}") from None
