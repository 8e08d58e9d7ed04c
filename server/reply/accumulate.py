"""One choice's outputs to text, folded until somebody takes them: detokenizer, stop strings, logprobs, echo.

A slow reader thus costs one pending delta, and a reply without streaming is the one delta at the end. Knows neither the
engine's client nor HTTP.
"""

from __future__ import annotations

from serve_llm.engine.types import FinishReason, Output, TokenLogprobs
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.reply.delta import Delta, TokenEntry
from serve_llm.server.reply.detokenize import DetokenizerFactory
from serve_llm.server.reply.stop import StopScanner


class Accumulator:
    """`finish_reason` is set once the text has ended; nothing may be pushed after that."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        detokenizers: DetokenizerFactory,
        eos_ids: tuple[int, ...],
        echo: str | None,
    ) -> None:
        self.index = index
        self.num_tokens = 0  # generated ones, up to the one that ended the text
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._eos_ids = eos_ids
        self._detokenizer = detokenizers.make(prompt_ids, params.skip_special_tokens)
        stops = params.stop_strings
        self._scanner = StopScanner(stops, params.include_stop_str_in_output) if stops else None
        self._plain = self._scanner is None and params.logprobs is None
        self._started = self._taken = False
        self._echo = echo
        self._echo_detokenizer = None if echo is None else detokenizers.make((), params.skip_special_tokens)
        self._prompt_ids = prompt_ids
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._entries: list[TokenEntry] = []  # those whose text is held back stay until it is released
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._stop_reason: int | str | None = None
        # Characters of the choice's text so far: decoded, and released by the stop scanner.
        self._num_decoded = self._num_released = 0

    def push(self, output: Output) -> int:
        """Add what a step brought. Returns how many of its tokens belong to the text (those after a stop string do
        not)."""
        if not self._started:
            self._start(output)
        if not self._plain or output.finish_reason is not None:
            return self._push_carefully(output)
        for token_id in output.token_ids:
            text = self._detokenizer.push(token_id)
            if text:
                self._text.append(text)
        self._token_ids += output.token_ids
        self.num_tokens += len(output.token_ids)
        return len(output.token_ids)

    def take(self) -> Delta:
        """What is new since the last call."""
        delta = Delta(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids,
            entries=self._released_entries() if self._entries else [],
            first=not self._taken,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._taken = True
        self._text, self._token_ids, self._prompt_logprobs = [], [], None
        return delta

    def _start(self, output: Output) -> None:
        self._started = True
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if self._echo is None or self._echo_detokenizer is None:
            return
        if self._params.logprobs is not None:
            offset = 0
            for token_id, logprobs in zip(self._prompt_ids, [None, *(output.prompt_logprobs or ())], strict=True):
                self._entries.append(TokenEntry(token_id, logprobs, offset))
                offset += len(self._echo_detokenizer.push(token_id))
        self._text.append(self._echo)
        self._num_decoded = self._num_released = len(self._echo)

    def _push_carefully(self, output: Output) -> int:
        before = self.num_tokens
        hidden = output.stop_id is not None and not self._params.include_stop_str_in_output
        num_shown = len(output.token_ids) - hidden
        for place, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            self._token_ids.append(token_id)
            if output.logprobs is not None:
                self._entries.append(TokenEntry(token_id, output.logprobs[place], self._num_decoded))
            if place < num_shown:
                self._release(self._detokenizer.push(token_id))
            if self.finish_reason is not None:
                return self.num_tokens - before
        if output.finish_reason is not None:
            self._finish(output)
        return self.num_tokens - before

    def _finish(self, output: Output) -> None:
        if self.num_tokens:  # else what is left is the prompt's
            self._release(self._detokenizer.flush())
        if self.finish_reason is not None:
            return
        if self._scanner is not None:
            rest = self._scanner.flush()
            self._text.append(rest)
            self._num_released += len(rest)
        self.finish_reason = output.finish_reason
        if output.stop_id not in self._eos_ids:
            self._stop_reason = output.stop_id

    def _release(self, text: str) -> None:
        """Newly decoded text, through the stop scanner."""
        self._num_decoded += len(text)
        if self._scanner is not None:
            text = self._scanner.push(text, armed=self.num_tokens > self._params.min_tokens)
            if self._scanner.matched is not None:
                self.finish_reason = FinishReason.STOP
                self._stop_reason = self._scanner.matched
        self._num_released += len(text)
        self._text.append(text)

    def _released_entries(self) -> list[TokenEntry]:
        """Entries whose text has begun to be released; at the end all, except those after a stop string's cut."""
        cut = isinstance(self._stop_reason, str)
        entries = self._entries
        if self.finish_reason is not None and not cut:
            self._entries = []
            return entries
        count = len(entries)
        while count and entries[count - 1].offset >= self._num_released:
            count -= 1
        self._entries = entries[count:]
        return entries[:count]
