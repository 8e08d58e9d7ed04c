"""Compile each grammar once, in a thread, so that no step waits for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from serve_llm.common.grammar import build_matcher, build_tokenizer
from serve_llm.common.hub import resolve_tokenizer
from serve_llm.common.tokenizer_files import find_tokenizer
from serve_llm.engine.config import Config

RECENT_GRAMMARS = 64  # unused matchers that are kept; a typical one takes 100 KB to 1 MB


def load_tokenizer(config: Config) -> LLTokenizer:
    """Load the tokenizer that the server uses, for masks as wide as the logits. Raises ModelError."""
    directory = Path(config.directory)
    if config.tokenizer is not None:
        directory = resolve_tokenizer(config.tokenizer, config.download_dir)
    text = (find_tokenizer(directory) / "tokenizer.json").read_text()
    return build_tokenizer(text, config.vocab_size)


class MatcherBuilder:
    """Compiles each grammar once, in the background. The resulting matchers are templates: copy them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(2, "grammar")
        self._matchers: WeakValueDictionary[str, Future[LLMatcher | None]] = WeakValueDictionary()
        self._recent: OrderedDict[str, Future[LLMatcher | None]] = OrderedDict()

    def load(self) -> Future[LLMatcher | None]:
        """Load the tokenizer in the background. That holds the GIL for up to half a second, so it should be done before
        the engine accepts requests. If it fails, the first request with a grammar gets the error."""
        return self.compile("")

    @property
    def tokenizer(self) -> LLTokenizer:
        """Load the tokenizer on first use."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._config)
            return self._tokenizer

    def compile(self, grammar: str) -> Future[LLMatcher | None]:
        """Return a matcher at the start of the text, which has an error if the grammar has one; None for an empty
        grammar, once the tokenizer is loaded. As long as the future is referenced, the same one is returned."""
        found = self._matchers.get(grammar)
        if found is None:
            found = self._matchers[grammar] = self._executor.submit(self._build, grammar)
        self._recent[grammar] = found
        self._recent.move_to_end(grammar)
        if len(self._recent) > RECENT_GRAMMARS:
            self._recent.popitem(last=False)
        return found

    def _build(self, grammar: str) -> LLMatcher | None:
        tokenizer = self.tokenizer
        return build_matcher(tokenizer, grammar) if grammar else None
