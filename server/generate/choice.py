"""One sequence of a generation: an engine request and the sink of its outputs."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.generate.delta import Delta
from serve_llm.server.generate.detokenize import DetokenizerFactory
from serve_llm.server.generate.dispatcher import SubmittedRequest
from serve_llm.server.generate.output import OutputProcessor
from serve_llm.server.http.errors import GenerationFailed, InvalidRequest, RequestError
from serve_llm.server.metrics.meter import ChoiceTimes
from serve_llm.server.prompt.validate import TextRequest

logger = logging.getLogger(__name__)


class ChoiceOwner(Protocol):
    """The part of `Generation` that its choices use."""

    request: TextRequest
    tenant: int

    def create_parser(self) -> DialectParser | None:
        """Create the parser of one choice; None if all text is content."""

    def as_current(self) -> AbstractContextManager[None]:
        """Attach the generation's request to log records."""

    def fail(self, error: RequestError) -> None:
        """End all choices with this error."""

    def on_first_output(self, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: prompt tokens computed for this choice."""

    def on_change(self, choice: Choice) -> None:
        """Called when the choice has new output since it was last taken."""

    def on_finish(self, choice: Choice, *, aborts: bool) -> None:
        """aborts: a stop string ended the text before the engine's request ended."""


class Choice:
    """See the module. The generation collects new output with `take`."""

    __slots__ = (
        "_generation",
        "_has_changed",
        "_is_first",
        "_num_preemptions",
        "cached_tokens",
        "engine_request",
        "output",
        "submitted",
        "times",
    )

    submitted: SubmittedRequest  # set when the generation is entered

    def __init__(
        self,
        generation: ChoiceOwner,
        detokenizers: DetokenizerFactory,
        request_id: int,
        prompt: int,
        choice: int,
        seed: int,
        arrival: float,
    ) -> None:
        """request_id: the engine request's. prompt, choice: indices. arrival: clock time."""
        request = generation.request
        echo = None if request.echoes is None else request.echoes[prompt]
        self.cached_tokens = 0  # prompt tokens found in the prefix cache
        self.output = OutputProcessor(
            prompt * request.params.n + choice,
            request.prompts[prompt],
            request.params,
            detokenizers,
            request.end_ids,
            None if echo is None else echo.text,
            generation.create_parser(),
            request.reply is None or request.reply.include_reasoning,
            () if echo is None else echo.added_positions,
        )
        self.engine_request = EngineCoreRequest(
            id=request_id,
            prompt_ids=request.prompts[prompt],
            sampling=msgspec.structs.replace(request.samplings[prompt], seed=seed, choice=choice),
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            tenant=generation.tenant,
            pooling=request.pooling,
            pools_tokens=request.pools_tokens,
            second_text_start=None if request.second_text_starts is None else request.second_text_starts[prompt],
        )
        self._generation = generation
        self._is_first = choice == 0  # a prompt's tokens are counted with its first choice
        self.times = ChoiceTimes(arrival)
        self._num_preemptions = 0
        self._has_changed = False

    def receive(self, output: EngineCoreOutput) -> None:
        """Called for each output of the engine request."""
        if output.finish_reason is FinishReason.ERROR:
            self._generation.fail(_build_error(output))
            return
        try:
            num_tokens = self.output.push(output)
        except Exception:  # a bug in one request must not stop the client's loop, which serves every stream
            with self._generation.as_current():
                logger.exception("the output of request %d could not be converted to text", output.id)
            self._generation.fail(GenerationFailed("the output could not be converted to text"))
            return
        if output.num_preemptions:
            self._num_preemptions += output.num_preemptions
        if self.times.last_token is None:
            self._begin(output)
        meter = self.submitted.meter
        self.times.last_token = meter.count_tokens(num_tokens, self.times.last_token)
        if not self._has_changed:
            self._has_changed = True
            self._generation.on_change(self)
        if self.output.finish_reason is not None:
            self.end(self.output.finish_reason)
            self._generation.on_finish(self, aborts=output.finish_reason is None)

    def take(self) -> Delta:
        """Return the delta since the last call."""
        self._has_changed = False
        return self.output.take()

    def take_plain_text(self) -> str | None:
        """See `OutputProcessor.take_plain_text`."""
        text = self.output.take_plain_text()
        if text is not None:
            self._has_changed = False
        return text

    def end(self, reason: FinishReason) -> None:
        """Record the end of the choice."""
        max_tokens = self.engine_request.sampling.max_tokens
        meter = self.submitted.meter
        meter.count_finished(reason, self.output.num_tokens, max_tokens, self.times, self._num_preemptions)

    def detach(self) -> None:
        """Drop what refers back to the choice, once nothing is delivered to it any more. Cycles of every request would
        fill the heap until a full collection, during which all streams wait."""
        del self._generation
        del self.submitted

    def _begin(self, output: EngineCoreOutput) -> None:
        self.cached_tokens = output.cached_tokens or 0
        num_prompt_tokens = len(self.engine_request.prompt_ids) if self._is_first else 0
        meter = self.submitted.meter
        if self._is_first:
            meter.count_prompt(num_prompt_tokens, self.cached_tokens, self._generation.request.params.n)
        self._generation.on_first_output(num_prompt_tokens)
        meter.count_first_output(self.times, output.queued_seconds)


def _build_error(output: EngineCoreOutput) -> RequestError:
    message = output.error or "the engine failed"
    return InvalidRequest(message) if output.is_contradiction else GenerationFailed(message)
