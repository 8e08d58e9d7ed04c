"""Compile `StructuredOutputs` into a grammar that the engine can follow, or refuse what cannot be enforced.

A grammar is tried with the model's own tokenizer under the engine's limits. Because this can take much time and memory,
requests do it in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
from llguidance import LLTokenizer

from serve_llm.common.grammar import build_tokenizer
from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.grammar import write_turn_grammar
from serve_llm.server.dialects.lark import GrammarTokens
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.checker import GrammarChecker
from serve_llm.server.structured_output.errors import GrammarError, WhitespaceError
from serve_llm.server.structured_output.params import StructuredOutputs
from serve_llm.server.structured_output.size_errors import blame_largest
from serve_llm.server.structured_output.structural_tag import parse_structural_tag, write_structural_tag
from serve_llm.server.structured_output.turn_form import GrammarSource, TurnForm, compute_key, name_param

CACHE_BYTES = 32 * 2**20  # grammars and errors
RETRY_SECONDS = 60.0  # afterwards, an aborted compilation is tried again: the machine may have been busy


class Grammar(msgspec.Struct, frozen=True):
    """The result of a compilation: a grammar, or the message and parameter of an InvalidRequest."""

    text: str = ""
    error: str = ""
    param: str | None = None
    was_ended: bool = False  # because of a limit on time or memory

    def unwrap(self) -> str:
        """Raises InvalidRequest."""
        if self.error:
            raise InvalidRequest(self.error, self.param)
        return self.text


class _CacheEntry(msgspec.Struct, frozen=True):
    grammar: Grammar
    created: float  # seconds of the cache's clock

    @property
    def num_bytes(self) -> int:
        return 200 + len(self.grammar.text) + len(self.grammar.error)


class GrammarCache:
    """Grammars and errors, keyed by their source; the least recently used ones are dropped. Thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, _CacheEntry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Grammar | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            if found.grammar.was_ended and self._clock() - found.created > RETRY_SECONDS:
                self._num_bytes -= self._entries.pop(key).num_bytes
                return None
            self._entries.move_to_end(key)
            return found.grammar

    def put(self, key: bytes, grammar: Grammar) -> None:
        with self._lock:
            if key in self._entries:
                return
            entry = _CacheEntry(grammar, self._clock())
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._num_bytes -= dropped.num_bytes


class CompilerHost(Protocol):
    """The server, as seen by the compiler in a prompt worker."""

    def find(self, key: bytes, param: str) -> Grammar | None:
        """Return the result of an earlier compilation. If there is none, the compilation starts now."""

    def begin(self, pointer: str, keyword: str | None) -> None:
        """Record what to name if the compilation that starts now has to be aborted: a place in a JSON schema, if it is
        one."""

    def keep(self, key: bytes, grammar: Grammar) -> None:
        """Record that the compilation is done."""

    def allow_loading(self) -> AbstractContextManager[None]:
        """Allow time for loading the tokenizer, which does not count for any job."""


class GrammarCompiler:
    """Compiles for one model and caches the results. Not thread-safe."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        max_bytes: int,
        host: CompilerHost | None = None,
        dialect: Dialect | None = None,
        end_ids: tuple[int, ...] = (),
    ) -> None:
        """read_tokenizer: returns the text of tokenizer.json. max_bytes: of the longest grammar. end_ids: end turns."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._host = host
        self._dialect = dialect
        self._end_ids = end_ids
        self._tokenizer: LLTokenizer | None = None
        self._tokens: GrammarTokens | None = None
        self.cache = GrammarCache()

    def load_tokenizer(self) -> LLTokenizer:
        """Load the tokenizer of masks on first use: 150,000 tokens take 2 s.

        Also collects what grammars of turns must know about it.
        """
        if self._tokenizer is None:
            with contextlib.nullcontext() if self._host is None else self._host.allow_loading():
                tokenizer = build_tokenizer(self._read_tokenizer(), self._vocab_size)
                if self._dialect is not None:
                    self._tokens = GrammarTokens(tokenizer, self._end_ids)
                self._tokenizer = tokenizer
        return self._tokenizer

    def compile(self, source: GrammarSource) -> str:
        """Return the grammar. Raises InvalidRequest; errors are cached too."""
        key = compute_key(source)
        found = self.cache.get(key)
        if found is None:
            if isinstance(source, TurnForm):
                for part in source.list_parts():  # each under the name of its own parameter
                    self.compile(part)
            elif source.whitespace_pattern is not None:
                param = source.name_param("whitespace_pattern")
                self.compile(StructuredOutputs(regex=source.whitespace_pattern, param=param))
            found = self._compile_in_host(key, source)
            self.cache.put(key, found)
        return found.unwrap()

    def _compile_in_host(self, key: bytes, source: GrammarSource) -> Grammar:
        if self._host is None:
            return self._try_compile(source)
        self.load_tokenizer()
        found = self._host.find(key, name_param(source))
        if found is None:
            largest = _find_largest(source)
            self._host.begin(largest.pointer, largest.keyword)
            found = self._try_compile(source)
            self._host.keep(key, found)
        return found

    def _try_compile(self, source: GrammarSource) -> Grammar:
        try:
            return Grammar(self._compile_turn(source) if isinstance(source, TurnForm) else self._compile(source))
        except WhitespaceError as error:
            assert isinstance(source, StructuredOutputs)
            return build_refusal(source.name_param("whitespace_pattern"), error)
        except GrammarError as error:
            return build_refusal(name_param(source), error)
        except (MemoryError, RecursionError) as error:
            return build_death_refusal(name_param(source), _find_largest(source), type(error).__name__)

    def _compile_turn(self, form: TurnForm) -> str:
        """Raises GrammarError. The parts have been compiled."""
        tokenizer = self.load_tokenizer()
        assert self._dialect is not None and self._tokens is not None
        content = None if form.structured_outputs is None else self.compile(form.structured_outputs)
        checker = GrammarChecker(tokenizer, self._max_bytes)
        grammar = write_turn_grammar(
            self._dialect,
            form.tools,
            form.tool_choice,
            parallel=form.parallel_tool_calls,
            in_reasoning=form.in_reasoning,
            content=content,
            tokens=self._tokens,
            write_schema=checker.write_json,
        )
        return "" if grammar is None else checker.check(grammar)

    def _compile(self, wanted: StructuredOutputs) -> str:
        """Raises GrammarError."""
        checker = GrammarChecker(self.load_tokenizer(), self._max_bytes, wanted)
        checker.check_whitespace()
        if wanted.json_object:
            return checker.build_json({"type": "object"})
        if wanted.json is not None:
            return checker.build_json(wanted.json)
        if wanted.choice is not None:
            return checker.build_choice(wanted.choice)
        if wanted.regex is not None:
            return checker.build_regex(wanted.regex)
        if wanted.grammar is not None:
            return checker.build_lark(wanted.grammar)
        if isinstance(wanted.structural_tag, str):
            checker.check_size(wanted.structural_tag)
        return checker.check(write_structural_tag(parse_structural_tag(wanted.structural_tag), checker))


def build_refusal(param: str, error: GrammarError) -> Grammar:
    """Return the cached form of an error: the parameter, a JSON pointer into it, the keyword and the reason."""
    place = f"{param} at #{error.pointer}" if error.pointer else param
    keyword = f"{error.keyword}: " if error.keyword is not None else ""
    return Grammar(error=f"{place}: {keyword}{error.message}{_advise(error)}", param=param)


def build_death_refusal(param: str, largest: GrammarError, reason: str) -> Grammar:
    """Return the cached form of a compilation that was aborted for this reason. largest: names the place."""
    refusal = build_refusal(param, GrammarError(f"it is too complex: {reason}", largest.pointer, largest.keyword))
    return msgspec.structs.replace(refusal, was_ended=True)


def _find_largest(source: GrammarSource) -> GrammarError:
    """Return an error that names the largest part of a JSON schema, without a message; without a place for other
    sources."""
    schema = source.json if isinstance(source, StructuredOutputs) else None
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    return blame_largest(schema, "") if isinstance(schema, dict) else GrammarError("")


def _advise(error: GrammarError) -> str:
    is_too_large = error.keyword == "oneOf" and error.message == "schema too large"
    if is_too_large or error.message.startswith("oneOf constraints are not supported"):
        return ': add "x-guidance": {"coerce_one_of": true} at the schema\'s root to have it treated as anyOf'
    return ""
