"""From a text-level request to a stream of deltas: the path that HTTP and the offline `LLM` share.

A `Generation` is n choices for each of its prompts; each choice is one request to the engine and the sink of its
outputs. What arrives becomes text at once and waits, folded, until it is taken. Knows neither HTTP nor tensors.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from serve_llm.engine.errors import EngineError
from serve_llm.engine.types import FinishReason, Output, Request
from serve_llm.server.errors import DeadlineExceeded, GenerationFailed, RequestError, Unavailable
from serve_llm.server.metrics import Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.record import Record
from serve_llm.server.replicas import Replicas
from serve_llm.server.reply.accumulate import Accumulator
from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.detokenize import DetokenizerFactory

logger = logging.getLogger(__name__)


class Generator:
    """Opens generations. `seed` makes the seeds of requests without one the same in every run."""

    def __init__(self, replicas: Replicas, model: ServedModel, seed: int | None = None) -> None:
        self.replicas = replicas
        self.model = model
        self.detokenizers = DetokenizerFactory(model.tokenizer)
        self._random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def open(
        self, request: TextRequest, arrival: float | None = None, *, tenant: int = 0, deadline: float | None = None
    ) -> Generation:
        """A generation, not submitted yet. `arrival`: when the request came, in the meter's time; now, if None.
        `tenant`: whose it is (types.Request). `deadline`: in the meter's time, when it ends with DeadlineExceeded."""
        return Generation(self, request, Meter.clock() if arrival is None else arrival, tenant, deadline)

    def draw_seed(self) -> int:
        return self._random.getrandbits(64)


class Generation:
    """A context manager: entering submits, leaving aborts what is still open.

    Choice `prompt * n + k` is the k-th of a prompt. Choices are taken from by `next` (what is new, as often as there is
    something) or by `whole` (everything, at the end).
    """

    def __init__(
        self, generator: Generator, request: TextRequest, arrival: float, tenant: int, deadline: float | None
    ) -> None:
        self.tenant = tenant
        self.deadline = deadline
        self.on_begin: Callable[[int], None] | None = None  # called for each choice's first token: prompt tokens
        self._timer: asyncio.TimerHandle | None = None
        self._replicas = generator.replicas
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._news: list[Choice] = []
        self._error: RequestError | None = None
        self.closed = False
        self.request = request
        self.choices = [
            Choice(self, generator, prompt, choice, seed, arrival)
            for prompt, seed in enumerate(self._seeds(generator))
            for choice in range(request.params.n)
        ]
        self._open = {choice.engine_request.id: choice for choice in self.choices}

    def _seeds(self, generator: Generator) -> list[int]:
        given = self.request.params.seed is not None
        return [sampling.seed if given else generator.draw_seed() for sampling in self.request.samplings]

    def __enter__(self) -> Self:
        try:
            records = self._replicas.submit_many([(choice.engine_request, choice.receive) for choice in self.choices])
        except EngineError as error:
            raise Unavailable(str(error)) from None
        for choice, record in zip(self.choices, records, strict=True):
            choice.record = record
        if self.deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(self.deadline - Meter.clock(), self._expire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def is_whole(self) -> bool:
        """All choices have ended by themselves."""
        return not self._open and not self.closed and self._error is None

    def close(self) -> None:
        """Abort what is still open; who waits in `next` or `whole` gets nothing more. Idempotent."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._end_open(FinishReason.ABORT)

    async def next(self) -> list[Delta]:
        """One delta for each choice that has something new; an empty list after the last, or when closed. Raises
        RequestError, after what came before it, when the engine gave up on the request."""
        while not self._news and self._open and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.closed:
            return []
        if self._error is not None and not self._news:
            raise self._error
        news, self._news = self._news, []
        return [choice.take() for choice in news]

    async def whole(self) -> list[Delta]:
        """One delta for each choice with all of it; an empty list when closed. Raises RequestError."""
        self._waits_for_end = True
        while self._open and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return [] if self.closed else [choice.take() for choice in self.choices]

    def counts(self) -> TokenCounts:
        return TokenCounts(
            prompt=sum(map(len, self.request.prompts)),
            completion=sum(choice.accumulator.num_tokens for choice in self.choices),
            cached=sum(choice.cached_tokens for choice in self.choices[:: self.request.params.n]),
        )

    # What the choices tell:

    def has_begun(self, num_prompt_tokens: int) -> None:
        if self.on_begin is not None:
            self.on_begin(num_prompt_tokens)

    def has_news(self, choice: Choice) -> None:
        self._news.append(choice)
        if not self._waits_for_end:
            self._wake()

    def has_ended(self, choice: Choice, aborts: bool) -> None:
        """`aborts`: the engine does not know yet that the text has ended."""
        request_id = choice.engine_request.id
        del self._open[request_id]
        if aborts:
            self._replicas.abort([request_id])
        if not self._open:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """One choice's error is the whole request's. Nothing happens if it has ended already."""
        if self._error is None and self._open:
            self._error = error
            self._end_open(FinishReason.ERROR)

    def _expire(self) -> None:
        why = self._replicas.outage
        reason = "it took longer than its limit" if why is None else f"it waited for an engine that is replaced: {why}"
        self.fail(DeadlineExceeded(f"the request's time is over: {reason}"))

    def _end_open(self, reason: FinishReason) -> None:
        ended, self._open = self._open, {}
        if ended:
            self._replicas.abort(list(ended))
        for choice in ended.values():
            choice.end(reason)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Choice:
    """One sequence of a generation, the sink of its engine request's outputs."""

    def __init__(
        self, generation: Generation, generator: Generator, prompt: int, choice: int, seed: int, arrival: float
    ) -> None:
        request = generation.request
        self._generation = generation
        self._engines = generator.replicas.engines
        self.record: Record | None = None  # from submission on
        self._is_first = choice == 0  # of its prompt: the one that the prompt's tokens are counted for
        self._arrival = arrival
        self._last_token: float | None = None  # when it came, in the meter's time
        self._has_news = False
        self.cached_tokens = 0
        self.accumulator = Accumulator(
            prompt * request.params.n + choice,
            request.prompts[prompt],
            request.params,
            generator.detokenizers,
            generator.model.eos_ids,
            None if request.echoes is None else request.echoes[prompt],
        )
        self.engine_request = Request(
            id=generator.replicas.next_id(),
            prompt_ids=request.prompts[prompt],
            sampling=msgspec.structs.replace(request.samplings[prompt], seed=seed, choice=choice),
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=generation.tenant,
        )

    @property
    def _meter(self) -> Meter:
        """Of the engine that computes it."""
        return self._engines[self.record.engine if self.record is not None else 0].meter

    def receive(self, output: Output) -> None:
        """Called for each output of its engine request."""
        if output.finish_reason is FinishReason.ERROR:
            self._generation.fail(GenerationFailed(output.error or "the engine failed"))
            return
        try:
            num_tokens = self.accumulator.push(output)
        except Exception:  # one request's trouble must not stop the client's loop, and with it every other stream
            logger.exception("the output of request %d could not be turned into text", output.id)
            self._generation.fail(GenerationFailed("the output could not be turned into text"))
            return
        if self._last_token is None:
            self._begin(output)
        meter = self._meter
        self._last_token = meter.count_tokens(num_tokens, self._last_token)
        if not self._has_news:
            self._has_news = True
            self._generation.has_news(self)
        if self.accumulator.finish_reason is not None:
            meter.count_finished(self.accumulator.finish_reason, self.accumulator.num_tokens, self._arrival)
            self._generation.has_ended(self, aborts=output.finish_reason is None)

    def take(self) -> Delta:
        self._has_news = False
        return self.accumulator.take()

    def end(self, reason: FinishReason) -> None:
        """Closed before its text ended."""
        self._meter.count_finished(reason, self.accumulator.num_tokens, self._arrival)

    def _begin(self, output: Output) -> None:
        self.cached_tokens = output.cached_tokens or 0
        meter = self._meter
        if self._is_first:
            meter.count_prompt(len(self.engine_request.prompt_ids))
        self._generation.has_begun(len(self.engine_request.prompt_ids) if self._is_first else 0)
        meter.count_first(self._arrival, output.queued_seconds)
