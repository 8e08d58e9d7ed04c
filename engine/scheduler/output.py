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

MaskSource = Callable[[], bytes]  # blocks until the masks of a step are ready; see `SchedulerOutput`


class NewRequestData(msgspec.Struct, frozen=True, array_like=True):
    """A request admitted in this step. Replaces any earlier request at its index."""

    req_index: int
    token_ids: list[int]  # prompt, then output so far
    num_prompt: int  # how many of token_ids are the prompt
    sampling: Sampling
    prompt_logprobs: int | None  # None if they were delivered before a preemption
    uses_long_rope: bool = False  # see `Sequence`
    pooling: bool = False  # return the prompt's vector
    pools_tokens: bool = False  # return a vector of each token of the prompt
    second_text_start: int | None = None  # see `EngineCoreRequest`
    adapter: Adapter | None = None  # to be loaded into `adapter_slot` for this step
    adapter_slot: int | None = None
    adapter_files: AdapterFiles | None = None  # for ranks on other hosts that do not hold the adapter


class ScheduledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one request to compute in this step: positions start .. start + count - 1.

    The last ones may be drafts, which are guesses of the ids that the step samples. With drafts, the step samples after
    the newest known token and after each draft.
    """

    req_index: int
    start: int
    count: int
    new_blocks: tuple[list[int], ...]  # per KV group: block ids to append to the request's block table; empty: none
    sample: bool  # the last position is the newest known token: sample the next one
    new_token_ids: list[int]  # added since this request was last scheduled
    logprobs_start: int | None = None  # report the known output ids after this position and later ones; None: none
    draft_ids: tuple[int, ...] = ()  # ids of the last tokens, which are not part of the request yet; only if `sample`
    restored_snapshot: int | None = None  # the states at `start`, to be copied before the step
    stored_snapshots: tuple[tuple[int, int], ...] = ()  # number of the tokens after which to copy the states, snapshot

    @property
    def num_samples(self) -> int:
        """Number of tokens, the last ones, after which an id is sampled."""
        return len(self.draft_ids) + self.sample

    @property
    def samples_every_token(self) -> bool:
        """Whether an id is sampled after each of the tokens."""
        return self.count == self.num_samples


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
    masked_rows: list[int] = []  # indices of the samples, in the order of `scheduled`, whose ids are restricted
    capture_size: int = 0  # if nothing is scheduled: capture the decode step of this many sequences
    copies: list[BlockCopy] = []  # to be made in this order before the step is computed
    is_for_draft_model: bool = False  # for the draft model on the ranks of the last stage
    stale: dict[int, int] = {}  # request index -> how many of its ids stay valid; the step brings the next ones

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.scheduled)

    @property
    def is_decode(self) -> bool:
        """Whether an id is sampled after every token."""
        return all(chunk.samples_every_token for chunk in self.scheduled)


class RunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Result of one ScheduledTokens; a step returns them in the order of `SchedulerOutput.scheduled`."""

    token_id: int | None = None  # set if a token was to be sampled
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 .., if the request wants them
    vector: bytes | None = None  # vector of the prompt that ends here, or those of its tokens; see `EngineCoreOutput`
    accepted_ids: tuple[int, ...] = ()  # drafts that equal the ids sampled there; token_id comes after them
    known_logprobs: tuple[TokenLogprobs, ...] = ()  # for accepted_ids, or positions logprobs_start+1 .. before token_id
    forced_ids: tuple[int, ...] = ()  # forced after token_id by the grammar; the structured output manager adds them
    ends_text: bool = False  # the grammar allows nothing after these ids, so the text is complete
    error: str | None = None  # set instead of a token that could not be sampled; ends the request
    # The hidden states of each token that the draft source reads, in the model's dtype; None if it reads none.
    hidden_states: bytes | None = None
    is_contradiction: bool = False  # see `EngineCoreOutput`

    def cut(self, num_accepted: int) -> None:
        """End the text at the accepted id after the first `num_accepted`, which becomes the sampled one."""
        self.token_id = self.accepted_ids[num_accepted]
        self.accepted_ids = self.accepted_ids[:num_accepted]
        if self.logprobs is not None:
            self.logprobs = self.known_logprobs[num_accepted]
            self.known_logprobs = self.known_logprobs[:num_accepted]
