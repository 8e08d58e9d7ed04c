"""What the server knows of one open request, so that another engine process can go on with it: what was received is
not lost with the process that computed it, nor asked for again.

Between the engine's client and the sink that makes text of ids; knows neither.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serve_llm.engine.types import FinishReason, Output, Request

CLEARED = 4  # tokens since a death after which a request is no longer suspected: some may have been on their way


class Record:
    """One request from its submission to its final output, however many engines compute it in turn."""

    __slots__ = ("_at_death", "_on_change", "deaths", "engine", "id", "is_placed", "output_ids", "request", "sink")

    def __init__(
        self, request: Request, sink: Callable[[Output], None], on_change: Callable[[Record, bool], None]
    ) -> None:
        """on_change: called with this, and whether it has ended, when it has ended or is cleared of suspicion."""
        self.id = request.id
        self.request = request  # as it was submitted last, under an id of its own: late outputs of others miss it
        self.sink = sink
        self.engine = 0  # index of the one that computes it, or did last
        self.is_placed = False
        self.deaths = 0  # of engines in a row that were computing it, with no progress in between
        self.output_ids: list[int] | None = None  # received; None before the first output, which may bring none
        self._at_death = 0
        self._on_change = on_change

    def receive(self, output: Output) -> None:
        """Called by the client of its engine for each output."""
        if self.output_ids is None:
            self.output_ids = list(output.token_ids)
        else:
            output.cached_tokens = output.queued_seconds = None  # those of the first admission have been told
            self.output_ids += output.token_ids
        if output.finish_reason is not None:
            self._on_change(self, True)
        elif self.deaths and len(self.output_ids) >= self._at_death + CLEARED:
            self.deaths = 0
            self._on_change(self, False)
        self.sink(output)

    @property
    def num_received(self) -> int:
        return len(self.output_ids or ())

    def take_back(self, new_id: int, in_step: bool = False) -> None:
        """No engine computes it any more; the next one gets it as `request`. in_step: its engine died computing it."""
        self.is_placed = False
        self.deaths += in_step
        received = self.output_ids
        self._at_death = self.num_received
        sampling = self.request.sampling
        if received is not None and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.request = msgspec.structs.replace(
            self.request, id=new_id, output_ids=list(received or ()), sampling=sampling
        )

    def fail(self, error: str) -> None:
        """Its final output, instead of an engine's."""
        self.sink(Output(id=self.id, token_ids=[], finish_reason=FinishReason.ERROR, error=error))
