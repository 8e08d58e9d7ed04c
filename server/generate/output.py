"""Converts one choice's outputs to text, with reasoning and tool calls, stop strings, log-probabilities and echo.

New output accumulates in one pending delta until it is taken, so a slow reader costs no more than one delta, and a
response without streaming is the delta at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import Protocol

import msgspec

from serve_llm.common.types import EngineCoreOutput, FinishReason, TokenLogprobs
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.generate.delta import Delta, TokenEntry
from serve_llm.server.generate.detokenize import DetokenizerFactory
from serve_llm.server.generate.repetition import RepetitionDetector
from serve_llm.server.generate.stop import StopScanner
from serve_llm.server.sampling_params import SamplingParams

_NO_IDS: list[int] = []  # never changed; one object for all choices instead of a new list per token


class TurnParser(Protocol):
    """`server.dialects.parser.DialectParser`."""

    @property
    def is_reasoning(self) -> bool: ...

    @property
    def is_content(self) -> bool: ...

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class OutputProcessor:
    """`finish_reason` is set once the text has ended; push nothing after that."""

    __slots__ = (
        "_added_positions",
        "_detokenizer",
        "_echo",
        "_echo_detokenizer",
        "_end_ids",
        "_entries",
        "_has_been_taken",
        "_has_other_pieces",
        "_has_started",
        "_include_reasoning",
        "_is_plain",
        "_num_calls",
        "_num_decoded",
        "_num_released",
        "_params",
        "_parser",
        "_pieces",
        "_prompt_ids",
        "_prompt_logprobs",
        "_repetition",
        "_scanner",
        "_stop_reason",
        "_text",
        "_token_ids",
        "_vector",
        "finish_reason",
        "index",
        "num_reasoning_tokens",
        "num_tokens",
    )

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        detokenizers: DetokenizerFactory,
        end_ids: tuple[int, ...],
        echo: str | None = None,
        parser: TurnParser | None = None,
        include_reasoning: bool = True,
        added_positions: Collection[int] = (),
    ) -> None:
        """index: of the choice. end_ids: stop ids that are not reported as `stop_reason`. echo: text of the prompt, to
        put before the choice; None: no echo. parser: finds reasoning and tool calls; None: all is content.
        include_reasoning: False omits the reasoning, its ids and its log-probabilities. added_positions: positions in
        `prompt_ids` that are not part of `echo`."""
        self.index = index
        self.num_tokens = 0  # generated tokens, up to the one that ended the text
        self.num_reasoning_tokens = 0  # part of `num_tokens`, delimiters included
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._end_ids = end_ids
        self._prompt_ids = prompt_ids
        context_ids = () if params.max_tokens == 0 else prompt_ids  # no text follows the prompt without a token
        self._detokenizer = detokenizers.create(context_ids, params.skip_special_tokens, parser is not None)
        self._scanner: StopScanner | None = None
        if params.stop_strings:
            self._scanner = StopScanner(params.stop_strings, params.include_stop_str_in_output)
        detection = params.repetition_detection
        self._repetition = None if detection is None else RepetitionDetector(detection)
        self._parser = parser
        self._include_reasoning = include_reasoning
        watches_text = self._scanner is not None or self._parser is not None or self._repetition is not None
        self._is_plain = not watches_text and params.logprobs is None
        self._echo = echo
        self._echo_detokenizer = None if echo is None else detokenizers.create((), skip_special_tokens=False)
        self._added_positions = frozenset(added_positions)
        self._has_started = False
        self._has_been_taken = False
        self._num_calls = 0
        # Characters of the choice's text so far; with a parser, of all its pieces:
        self._num_decoded = 0
        self._num_released = 0  # by the stop scanner
        # The pending delta:
        self._text: list[str] = []
        self._pieces: list[Piece] = []  # with a parser, content too
        self._has_other_pieces = False  # than content
        self._token_ids: list[int] = []
        self._entries: list[TokenEntry] = []  # entries stay here while the stop scanner holds back their text
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._stop_reason: int | str | None = None
        self._vector: bytes | None = None

    def push(self, output: EngineCoreOutput) -> int:
        """Add a step's output, whose list of ids the processor keeps. Returns how many of its tokens belong to the
        text, that is, precede a stop string."""
        if not self._has_started:
            self._start(output)
        if not self._is_plain or output.finish_reason is not None:
            return self._push_token_by_token(output)
        token_ids = output.token_ids
        for token_id in token_ids:
            text = self._detokenizer.push(token_id)
            if text:
                self._text.append(text)
        if self._token_ids:
            self._token_ids += token_ids
        else:  # usually
            self._token_ids = token_ids
        num_tokens = len(token_ids)
        self.num_tokens += num_tokens
        return num_tokens

    def take_plain_text(self) -> str | None:
        """Like `take` if the output since the last call is nothing but text, whose ids nobody needs; otherwise None,
        and nothing is taken."""
        if not self._has_been_taken or self._entries or self._has_other_pieces or self._num_calls or self.finish_reason:
            return None
        text = "".join(self._text)
        self._text.clear()
        self._token_ids = _NO_IDS
        if self._pieces:
            self._pieces = []
        return text

    def take(self) -> Delta:
        """Return the output since the last call."""
        has_more = self._entries or self._has_other_pieces or self._num_calls or self.finish_reason is not None
        if self._has_been_taken and not has_more:  # usually
            delta = Delta(self.index, "".join(self._text), self._token_ids, [], False)
            self._text = []
            self._token_ids = []
            if self._pieces:
                self._pieces = []
            return delta
        delta = Delta(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids,
            entries=self._take_released_entries() if self._entries else [],
            first=not self._has_been_taken,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_logprobs=self._prompt_logprobs,
            pieces=list(merge_pieces(self._pieces)) if self._has_other_pieces else [],
            num_calls=self._num_calls,
            vector=self._vector,
        )
        self._has_been_taken = True
        self._text = []
        self._pieces = []
        self._has_other_pieces = False
        self._token_ids = []
        self._prompt_logprobs = None
        return delta

    def _start(self, output: EngineCoreOutput) -> None:
        """Handle the prompt: its log-probabilities come with the first output."""
        self._has_started = True
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if self._echo is None or self._echo_detokenizer is None:
            return
        if self._params.logprobs is not None:
            offset = 0
            all_logprobs = [None, *(output.prompt_logprobs or ())]
            for position, (token_id, logprobs) in enumerate(zip(self._prompt_ids, all_logprobs, strict=True)):
                self._entries.append(TokenEntry(token_id, logprobs, min(offset, len(self._echo))))
                if position not in self._added_positions:
                    offset += len(self._echo_detokenizer.push(token_id))
        self._text.append(self._echo)
        self._num_decoded = len(self._echo)
        self._num_released = len(self._echo)

    def _push_token_by_token(self, output: EngineCoreOutput) -> int:
        num_before = self.num_tokens
        hides_stop_id = output.stop_id is not None and not self._params.include_stop_str_in_output
        num_shown = len(output.token_ids) - hides_stop_id
        if self._token_ids is _NO_IDS:
            self._token_ids = []
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            offset = self._num_decoded
            is_content = position < num_shown and (self._parser is None or self._parser.is_content)
            was_reasoning = self._parser is not None and self._parser.is_reasoning
            if position < num_shown:
                self._add_text(self._detokenizer.push(token_id))
            if was_reasoning or (self._parser is not None and self._parser.is_reasoning):
                self.num_reasoning_tokens += 1
                if not self._include_reasoning:
                    continue
            self._token_ids.append(token_id)
            if output.logprobs is not None:
                self._entries.append(TokenEntry(token_id, output.logprobs[position], offset, is_content))
            if self.finish_reason is not None:
                return self.num_tokens - num_before
            if self._repeats(token_id) and (position + 1 < len(output.token_ids) or output.finish_reason is None):
                self._finish_text()
                self.finish_reason = self.finish_reason or FinishReason.REPETITION
                return self.num_tokens - num_before
        if output.finish_reason is not None:
            self._finish(output)
        return self.num_tokens - num_before

    def _repeats(self, token_id: int) -> bool:
        """Whether the text repeats itself with this token."""
        if self._repetition is None:
            return False
        return self._repetition.push(token_id) and self.num_tokens >= self._params.min_tokens

    def _finish(self, output: EngineCoreOutput) -> None:
        self._finish_text()
        if self.finish_reason is not None:
            return
        self.finish_reason = output.finish_reason
        self._vector = output.vector
        if output.stop_id not in self._end_ids:
            self._stop_reason = output.stop_id

    def _finish_text(self) -> None:
        """Release all text that was held back. A stop string in it ends the text."""
        if self.num_tokens:  # without tokens, the detokenizer holds only an incomplete character of the prompt
            self._add_text(self._detokenizer.flush())
        if self._parser is not None and self.finish_reason is None:
            self._add_pieces(self._parser.finish())
        if self.finish_reason is None:
            self._release_held_back()

    def _add_text(self, text: str) -> None:
        """Pass newly decoded text through the parser and the stop scanner."""
        if self._parser is None:
            self._add_content(text)
        elif text:
            self._add_pieces(self._parser.push(text))

    def _add_pieces(self, pieces: list[Piece]) -> None:
        """Only content can contain a stop string."""
        for piece in pieces:
            if self.finish_reason is not None:  # a stop string ended the text
                return
            if isinstance(piece, ContentPiece):
                self._add_content(piece.text)
                continue
            self._release_held_back()
            if isinstance(piece, CallBegin):
                self._num_calls += 1
            elif isinstance(piece, ReasoningPiece | ArgumentsPiece):
                self._num_decoded += len(piece.text)
                self._num_released += len(piece.text)
            if self._include_reasoning or not isinstance(piece, ReasoningPiece):
                self._pieces.append(piece)
                self._has_other_pieces = True

    def _add_content(self, text: str) -> None:
        self._num_decoded += len(text)
        if self._scanner is not None:
            text = self._scanner.push(text, armed=self.num_tokens > self._params.min_tokens)
            if self._scanner.matched is not None:
                self.finish_reason = FinishReason.STOP
                self._stop_reason = self._scanner.matched
        self._release(text)

    def _release_held_back(self) -> None:
        """Called with text that turned out not to begin a stop string."""
        if self._scanner is not None:
            self._release(self._scanner.flush())

    def _release(self, text: str) -> None:
        if not text:
            return
        self._num_released += len(text)
        self._text.append(text)
        if self._parser is not None:
            self._pieces.append(ContentPiece(text))

    @property
    def num_logprobs(self) -> int:
        """Tokens with log-probabilities that the next delta may have, those of the prompt included."""
        return len(self._entries) + len(self._prompt_logprobs or ())

    def _take_released_entries(self) -> list[TokenEntry]:
        """Take the entries whose text has at least partly been released; at the end all, except those after a stop
        string."""
        entries = self._entries
        was_cut = isinstance(self._stop_reason, str)
        if self.finish_reason is not None and not was_cut:
            self._entries = []
            return entries
        count = len(entries)
        while count and entries[count - 1].offset >= self._num_released:
            count -= 1
        self._entries = entries[count:]
        return entries[:count]


def merge_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join neighbouring pieces of one kind. Arguments of two calls are never neighbours: the second call begins in
    between."""
    for kind, group in groupby(pieces, type):
        run = list(group)
        if len(run) > 1 and kind in (ReasoningPiece, ContentPiece, ArgumentsPiece):
            text = "".join(piece.text for piece in run)  # type: ignore[union-attr]
            yield msgspec.structs.replace(run[0], text=text)
        else:
            yield from run
