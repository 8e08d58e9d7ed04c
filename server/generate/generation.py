"""From a validated request to a stream of deltas: the path that HTTP and the offline `LLM` share.

A `Generation` has n choices for each of its prompts. Each choice is one engine request and the sink of its outputs,
which are detokenized immediately and accumulate until they are taken.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import msgspec

from serve_llm.common.logs import CURRENT_REQUEST
from serve_llm.common.types import FinishReason
from serve_llm.server.admission.controller import AdmissionRequest
from serve_llm.server.admission.recent_requests import read_label
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.generate.choice import Choice
from serve_llm.server.generate.delta import Delta, RequestTimes, TokenCounts
from serve_llm.server.generate.detokenize import DetokenizerFactory
from serve_llm.server.generate.dispatcher import Dispatcher
from serve_llm.server.generate.push_queue import PushQueue
from serve_llm.server.http.errors import DeadlineExceeded, GenerationFailed, RequestError
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.validate import TextRequest

logger = logging.getLogger(__name__)


class Generator:
    """Creates generations on one model."""

    def __init__(self, dispatcher: Dispatcher, model: ServedModel, seed: int | None = None) -> None:
        """seed: makes the seeds of requests without one reproducible."""
        self.dispatcher = dispatcher
        self.model = model
        self.detokenizers = DetokenizerFactory(model.tokenizer, model.dialect)
        self.push_queue = PushQueue()
        self._random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def open(
        self,
        request: TextRequest,
        arrival: float | None = None,
        *,
        tenant: int = 0,
        deadline: float | None = None,
        priority: int | None = None,
    ) -> Generation:
        """Create a generation that has not been submitted yet.

        arrival: clock time of the request's arrival; None: now. tenant: the number of its API key. deadline: clock time
        at which it ends with DeadlineExceeded; None: no limit. priority: None: the request's own.
        """
        if arrival is None:
            arrival = self.dispatcher.clock.read()
        if priority is not None:
            request = msgspec.structs.replace(request, priority=priority)
        return Generation(self, request, arrival, tenant, deadline)

    def draw_seed(self) -> int:
        return self._random.getrandbits(64)


class Generation:
    """A context manager: entering it admits and submits the request, leaving it aborts all open choices.

    Choice `prompt * n + k` is the k-th of a prompt. Read it either with repeated calls of `next`, or with one call of
    `read_whole`.
    """

    def __init__(
        self, generator: Generator, request: TextRequest, arrival: float, tenant: int, deadline: float | None
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.closed = False
        self._is_cut = False  # closed before all choices had ended
        self._logged_request = CURRENT_REQUEST.get()
        self._dialect = generator.model.dialect
        self._spelled_ends = generator.model.spelled_ends
        self._tools = [] if request.reply is None else request.reply.read_tools()
        self.choices = [
            Choice(self, generator.detokenizers, generator.dispatcher.next_id(), prompt, choice, seed, arrival)
            for prompt, seed in enumerate(_choose_seeds(request, generator))
            for choice in range(request.params.n)
        ]
        self._open = {choice.engine_request.id: choice for choice in self.choices}
        self._dispatcher = generator.dispatcher
        self._admission_request = AdmissionRequest(
            tenant=tenant,
            priority=request.priority,
            max_tokens=max(sampling.max_tokens for sampling in request.samplings),
            deadline=deadline,
            fail=self.fail,
            num_waiting=len(self.choices),
            num_waiting_tokens=sum(map(len, request.prompts)),
            label=read_label(self._logged_request),
        )
        self._deadline = deadline
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._is_refused = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._push: Callable[[], bool | None] | None = None  # see `push_to`
        self._push_queue = generator.push_queue
        self._is_pushing = False  # a call of `_push` is scheduled
        self._has_pushed = False  # `_push` has written something
        self._changed: list[Choice] = []  # choices with new output
        self.error: RequestError | None = None  # the error that ended all choices
        self.on_end: Callable[[Generation], None] | None = None  # called once, on exit

    def __enter__(self) -> Self:
        """Raises Unavailable if the server cannot accept the request now, DeadlineExceeded if the deadline cannot be
        met. In a front end, `next` and `read_whole` raise these errors instead."""
        pairs = [(choice.engine_request, choice.receive) for choice in self.choices]
        submitted = self._dispatcher.submit(self._admission_request, pairs, self._refuse)
        now = self._dispatcher.clock.read()
        for choice, one in zip(self.choices, submitted, strict=True):
            choice.submitted = one
            choice.times.submitted = now
        self._start_deadline_timer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        is_whole = not self._open and not self._is_cut and self.error is None
        self.close()
        if not self._is_refused:
            self._count_longest()
        num_generated = self.counts().completion // len(self.choices)
        self._dispatcher.release(self._admission_request, num_generated, is_whole=is_whole)
        if self.on_end is not None:
            self.on_end(self)
        for choice in self.choices:
            choice.detach()
        del self._admission_request  # refers to this, and a cycle would last until a full collection

    def close(self) -> None:
        """Abort all open choices; `next` and `read_whole` return nothing more. Idempotent."""
        self.closed = True
        self._is_cut = self._is_cut or bool(self._open)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._end_open(FinishReason.ABORT)

    async def next(self) -> list[Delta]:
        """Return one delta for each choice with new output; an empty list after the last one, or when closed.

        Raises RequestError if the request fails, after returning all earlier output.
        """
        while not self._changed and self._open and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.closed:
            return []
        if self.error is not None and not self._changed:
            raise self.error
        return self.take_changed()

    async def push_to(self, push: Callable[[], bool | None], seconds: float | None = None) -> bool:
        """Call `push` after each step with new output, until it returns None or the generation ends. `push` gets the
        output from `take_changed` and returns whether it wrote any. This costs less than waking a task for `next`.

        seconds: return True after this time in which nothing was written, or up to twice as long; None: no limit."""
        loop = asyncio.get_running_loop()
        self._push = push
        try:
            while self._push is not None and self._open and not self.closed:
                self._has_pushed = False
                self._waiter = loop.create_future()
                timer = None if seconds is None else loop.call_later(seconds, self._wake)
                await self._waiter
                if timer is not None:
                    timer.cancel()
                    if not self._has_pushed:
                        return True
            return False
        finally:
            self._push = None

    def push_changes(self) -> None:
        """See `PushQueue`."""
        self._is_pushing = False
        if self._push is None or not self._changed or self.closed:
            return
        try:
            has_written = self._push()
        except RequestError as error:
            self._fail_push(error)
            return
        except Exception:
            with self.as_current():
                logger.exception("the output of a request could not be sent")
            self._fail_push(GenerationFailed("internal error; the server's log says more"))
            return
        self._has_pushed |= has_written is not False
        if has_written is None:
            self._push = None
            self._wake()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Attach the request to log records that are written outside its own task, such as when outputs arrive."""
        token = CURRENT_REQUEST.set(self._logged_request)
        try:
            yield
        finally:
            CURRENT_REQUEST.reset(token)

    def _fail_push(self, error: RequestError) -> None:
        """Like `fail`, but works after the last output too."""
        if self.error is None:
            self.error = error
        self._end_open(FinishReason.ERROR)

    def take_changed(self) -> list[Delta]:
        """Return one delta for each choice with new output."""
        changed = self._changed
        self._changed = []
        if len(changed) == 1:  # usually
            return [changed[0].take()]
        return [choice.take() for choice in changed]

    def count_new_logprobs(self) -> int:
        return sum(choice.output.num_logprobs for choice in self._changed)  # what `take_changed` would return

    def take_plain_text(self) -> str | None:
        """The new text of the only choice, if nothing but text is new. Otherwise None, and nothing is taken."""
        text = self._changed[0].take_plain_text() if self._changed else None
        if text is not None:
            self._changed.clear()
        return text

    async def wait(self, seconds: float) -> bool:
        """Wait at most this long until `next` has something to return. Returns False if it still has nothing."""
        if not self._changed and self._open and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().call_later(seconds, self._wake)
            await self._waiter
            timer.cancel()
        return bool(self._changed) or not self._open or self.closed

    async def read_whole(self) -> list[Delta]:
        """Return one complete delta per choice once all have ended; an empty list when closed. Raises RequestError."""
        self._waits_for_end = True
        while self._open and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error
        return [] if self.closed else [choice.take() for choice in self.choices]

    def take_rest(self) -> list[Delta]:
        """Return output that was not read before the generation was closed: one delta per choice."""
        return [choice.take() for choice in self.choices]

    def counts(self, *, with_times: bool = False) -> TokenCounts:
        return TokenCounts(
            prompt=sum(map(len, self.request.prompts)),
            completion=sum(choice.output.num_tokens for choice in self.choices),
            cached=sum(choice.cached_tokens for choice in self.choices[:: self.request.params.n]),
            reasoning=self._count_reasoning(),
            times=self._measure() if with_times else None,
        )

    def _measure(self) -> RequestTimes | None:
        """Return the times of the request; None until there is a token."""
        all_times = [choice.times for choice in self.choices if choice.times.first_token is not None]
        if not all_times:
            return None
        return RequestTimes(
            num_choices=len(all_times),
            submitted=min(times.submitted for times in all_times),
            scheduled=min(times.scheduled or 0.0 for times in all_times),
            first_token=min(times.first_token or 0.0 for times in all_times),
            last_token=max(times.last_token or 0.0 for times in all_times),
            decode_seconds=sum((times.last_token or 0.0) - (times.first_token or 0.0) for times in all_times),
        )

    def _count_reasoning(self) -> int | None:
        if self.request.reply is None or self._dialect is None or self._dialect.reasoning is None:
            return None
        return sum(choice.output.num_reasoning_tokens for choice in self.choices)

    def create_parser(self) -> DialectParser | None:
        """Create the parser of one choice; None if all text is content."""
        reply = self.request.reply
        if reply is None or self._dialect is None:
            return None
        return DialectParser(
            self._dialect,
            self._tools,
            in_reasoning=reply.in_reasoning,
            parse_calls=bool(self._tools),
            requires_call=reply.requires_call,
            content_has_form=reply.content_has_form,
            spelled_ends=self._spelled_ends,
            num_previous_calls=reply.num_previous_calls,
        )

    def fail(self, error: RequestError) -> None:
        """End all choices with an error. Does nothing if they have already ended."""
        if self.error is None and self._open:
            self.error = error
            self._end_open(FinishReason.ERROR)

    def _refuse(self, error: RequestError) -> None:
        """Record that the request was not admitted; its choices do not count as ended."""
        self.error = error
        self._is_refused = True
        self._open = {}
        self._wake()

    # Reports of the choices

    def on_first_output(self, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: prompt tokens computed for this choice; 0 for the later choices of a prompt."""
        self._has_begun = True
        self._dispatcher.begin(self._admission_request, num_prompt_tokens)

    def on_change(self, choice: Choice) -> None:
        """Called when the choice has new output since it was last taken."""
        self._changed.append(choice)
        if self._push is not None:
            if not self._is_pushing:
                self._is_pushing = True
                self._push_queue.add(self)
        elif not self._waits_for_end:
            self._wake()

    def on_finish(self, choice: Choice, *, aborts: bool) -> None:
        """aborts: a stop string ended the text before the engine's request ended."""
        request_id = choice.engine_request.id
        del self._open[request_id]
        if aborts:
            self._dispatcher.abort([request_id])
        if not self._open:
            self._wake()

    def _count_longest(self) -> None:
        """Record the length of the longest choice of each prompt."""
        n = self.request.params.n
        for start in range(0, len(self.choices), n):
            longest = max(choice.output.num_tokens for choice in self.choices[start : start + n])
            self.choices[start].submitted.meter.max_generation_tokens.observe(longest)

    def _start_deadline_timer(self) -> None:
        """End the request at its deadline or, while it has no token, as soon as it can no longer finish in time."""
        if self._deadline is None:
            return
        loop = asyncio.get_running_loop()
        if self._has_begun:
            seconds = self._deadline - self._dispatcher.clock.read()
            self._deadline_timer = loop.call_later(seconds, self._expire)
        else:
            seconds = self._dispatcher.seconds_to_begin(self._admission_request, self._deadline)
            self._deadline_timer = loop.call_later(seconds, self._expire_unless_begun)

    def _expire_unless_begun(self) -> None:
        if self._has_begun:
            self._start_deadline_timer()
        else:
            self._expire()

    def _expire(self) -> None:
        reason = "it took longer than its limit" if self._has_begun else "it waited too long to finish in time"
        outage = self._dispatcher.outage
        if outage is not None:
            reason = f"it waited for an engine to be replaced: {outage}"
        self.fail(DeadlineExceeded(f"the request's deadline has passed: {reason}"))

    def _end_open(self, reason: FinishReason) -> None:
        ended = self._open
        self._open = {}
        if ended:
            self._dispatcher.abort(list(ended))
        for choice in ended.values():
            choice.end(reason)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _choose_seeds(request: TextRequest, generator: Generator) -> list[int]:
    """Choose one seed per prompt."""
    if request.params.seed is not None:
        return [sampling.seed for sampling in request.samplings]
    return [generator.draw_seed() for _ in request.samplings]
