"""Messages between the scheduler and the workers: what a step computes, and its results.

A live request owns one permanent index (`req_index`) from its admission until it ends or is preempted. The first step
that schedules it carries NewRequestData; later steps carry only the tokens to compute and the ids and blocks added
since. Sampled ids reach every worker this way, including the one that sampled them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serve_llm.common.adapter_files import AdapterFiles
from serve_llm.common.types import Adapter, Sampling, TokenLogprobs

MaskSource = Callable[[], bytes]  # waits for the masks of a step; see `SchedulerOutput`


class NewRequestData(msgspec.Struct, frozen=True, array_like=True):
    """A request admitted in this step. Replaces whatever the workers held at its index."""

    req_index: int
    token_ids: list[int]  # prompt, then output so far
    num_prompt: int  # how many of token_ids are the prompt
    sampling: Sampling
    prompt_logprobs: int | None  # None also if they were delivered before a preemption
    uses_long_rope: bool = False  # see `Sequence`
    pooling: bool = False  # return the prompt's vector
    second_text_start: int | None = None  # see `Request`
    adapter: Adapter | None = None  # to be in `adapter_slot` from this step on
    adapter_slot: int | None = None
    adapter_files: AdapterFiles | None = None  # for ranks on other hosts that do not hold the adapter


class ScheduledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one request to compute in this step: positions start .. start + count - 1.

    The last ones may be drafts: guesses of the ids that the step samples. A step with drafts samples after the newest
    known token and after each draft.
    """

    req_index: int
    start: int
    count: int
    new_blocks: tuple[list[int], ...]  # per KV group: block ids to append to the request's block table; empty: none
    sample: bool  # the last position is the newest known token: sample the next one
    new_token_ids: list[int]  # added since this request was last scheduled
    logprobs_start: int | None = None  # from this position on, report the known output ids that follow; None: none
    draft_ids: tuple[int, ...] = ()  # the ids of the last tokens, which the request does not have yet; only if `sample`

    @property
    def num_samples(self) -> int:
        """Tokens after which an id is sampled: the last ones."""
        return len(self.draft_ids) + self.sample


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block to copy between the device and host memory."""

    block: int  # number on the device
    slot: int  # number in host memory
    to_device: bool


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step. If it has masked rows, the message after it holds their masks, which only sampling waits for:
    (len(masked_rows), ceil(vocab_size / 32)) int32, little-endian; bit i % 32 of word i // 32: id i is allowed."""

    new_requests: list[NewRequestData]
    scheduled: list[ScheduledTokens]
    masked_rows: list[int] = []  # numbers of the samples, in the order of `scheduled`, whose ids are restricted
    capture_size: int = 0  # if nothing is scheduled: capture the decode step of this many sequences
    copies: list[BlockCopy] = []  # to be made in this order, before anything is computed

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.scheduled)

    @property
    def is_decode(self) -> bool:
        """Whether an id is sampled after every token."""
        return all(chunk.count == chunk.num_samples for chunk in self.scheduled)


class RunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Result of one ScheduledTokens; a step returns them in the order of `SchedulerOutput.scheduled`."""

    token_id: int | None = None  # set if a token was to be sampled
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 .., if the request wants them
    vector: bytes | None = None  # if a pooling request's prompt ends with this chunk; see `Output`
    accepted_ids: tuple[int, ...] = ()  # drafts that are the ids which were sampled there; token_id comes after them
    known_logprobs: tuple[TokenLogprobs, ...] = ()  # for accepted_ids, or positions logprobs_start+1 .. before token_id
    forced_ids: tuple[int, ...] = ()  # what the grammar demands after token_id; the structured output manager adds them
    ends_text: bool = False  # the text is complete with these ids: its grammar allows nothing more
    error: str | None = None  # set instead of a token that could not be sampled; ends the request
    # Of each token: the hidden states that the draft source reads, in the model's dtype. None if it reads none.
    hidden_states: bytes | None = None
    is_contradiction: bool = False  # see `Output`

    def cut(self, num_accepted: int) -> None:
        """Make the accepted id after the first `num_accepted` the sampled one: the text ends with it."""
        self.token_id = self.accepted_ids[num_accepted]
        self.accepted_ids = self.accepted_ids[:num_accepted]
        if self.logprobs is not None:
            self.logprobs = self.known_logprobs[num_accepted]
            self.known_logprobs = self.known_logprobs[:num_accepted]
