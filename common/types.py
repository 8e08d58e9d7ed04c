"""Types that the server (text) and the engine (token ids) exchange: plain msgspec structs.

Their values are valid: the server checks what a client sent (`server.prompt.validate`), the engine trusts it.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from functools import cached_property
from typing import Literal

import msgspec

LOWEST_PRIORITY = 2**31 - 1  # runs after everything else
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy, as in vLLM: dividing logits by them would overflow
PoolingTask = Literal["none", "embed", "classify", "token_classify"]  # result of a pooling request


class FinishReason(StrEnum):
    """Why a request finished. Every accepted request ends with exactly one of these."""

    STOP = "stop"  # end-of-sequence id, a stop id, or (server) a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    REPETITION = "repetition"  # (server) the text repeats itself
    ABORT = "abort"  # the client disconnected, or the server aborted it
    ERROR = "error"  # the engine failed; see EngineCoreOutput.error


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limit on the reasoning tokens of a request. Once it is reached, the closing delimiter is forced."""

    num_tokens: int  # over all reasoning regions, without the delimiters that open them
    close_ids: tuple[int, ...]  # the delimiter that closes the region, at least one id
    open_ids: tuple[tuple[int, ...], ...] = ()  # delimiters that open it at the start of the text; may be empty
    other_close_ids: tuple[tuple[int, ...], ...] = ()  # further delimiters that close it
    is_open: bool = False  # the prompt has opened the region
    repeats: bool = False  # `open_ids` may also open it later, outside tool calls
    ends_at_call: bool = False  # a tool call inside it closes it
    call_open_ids: tuple[tuple[int, ...], ...] = ()  # delimiters that open a tool call
    call_close_ids: tuple[tuple[int, ...], ...] = ()


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Id-level sampling parameters of one sequence; strings never reach the engine.

    The sampling noise is a pure function of (seed, choice, output position), so an interrupted request can continue at
    any token with the same result.
    """

    max_tokens: int  # 0: compute only the prompt (prompt_logprobs)
    seed: int  # 0 .. 2**64 - 1; the server draws one if the request has none
    choice: int = 0  # index among the n choices of one request
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # forbids the last id of each tuple after its other ids
    stop_token_ids: tuple[int, ...] = ()  # including the model's end-of-sequence ids, unless ignore_eos
    min_tokens: int = 0  # stop_token_ids are masked until then
    logprobs: int | None = None  # None: off; k: the chosen token and the k most likely ones, raw distribution
    logprob_token_ids: tuple[int, ...] = ()  # distinct ids whose log-probabilities are returned as well
    grammar: str = ""  # in llguidance's own format; the text must satisfy it. Empty: none
    thinking: ThinkingBudget | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token except the first

    @property
    def is_constrained(self) -> bool:
        """Whether the previous ids determine which ids are allowed next."""
        return bool(self.grammar) or self.thinking is not None

    @cached_property
    def allowed_set(self) -> frozenset[int]:
        """`allowed_token_ids`, which may be most of a vocabulary."""
        return frozenset(self.allowed_token_ids)

    @cached_property
    def allowed_array(self) -> array[int]:
        """`allowed_token_ids` as integers of 64 bits."""
        return array("q", self.allowed_token_ids)

    @cached_property  # this and the next property are read for every token
    def adjusts_logits(self) -> bool:
        """Whether biases, bans or penalties may change the logits of any token, even after `min_tokens`."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_ids
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
        )

    @cached_property
    def reads_history(self) -> bool:
        """Whether the logits depend on the previous ids themselves, not only on their number."""
        return bool(
            self.is_constrained
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or any(len(word) > 1 for word in self.bad_words_ids)
        )


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, as requests and engines name it. Adapters with equal digests compute the same."""

    name: str
    directory: str
    digest: str  # SHA-256 of the adapter's files


class LoRATarget(msgspec.Struct, frozen=True):
    """A layer that an adapter can change. "router" includes a shared expert's gate; "expert" is a layer of one
    expert."""

    module: str  # its name in the model's checkpoint
    outputs: int
    inputs: int  # the size of the vocabulary for an embedding
    kind: Literal["linear", "router", "expert", "experts", "embedding", "head"] = "linear"
    stored: tuple[str, ...] = ()  # possible names in the checkpoint for the weight of an embedding or head
    members: int = 1  # experts whose weights "experts" stands for, those of one linear layer; PEFT names a parameter


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to continue. An HTTP request with n choices becomes n of these, with `sampling.choice` 0..n-1."""

    id: int  # chosen by the server, unique among its open requests
    prompt_ids: list[int]
    sampling: Sampling
    output_ids: list[int] = []  # already generated, if the request is resumed; counted as output
    priority: int = 0  # smaller runs first
    tenant: int = 0  # index of the API key; at equal priority, the least-served tenant goes first
    cache_salt: str = ""  # prefix blocks are shared only between equal salts
    pooling: bool = False  # return the vector of the prompt instead of tokens
    pools_tokens: bool = False  # with `pooling`: return a vector of each token of the prompt
    second_text_start: int | None = None  # index in prompt_ids at which the second text of a pair begins
    adapter: Adapter | None = None  # None: the base model


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: natural log, of the raw logits before temperature, penalties and masks."""

    logprob: float  # log probability of the actual token
    rank: int  # 1: the most likely token
    top_ids: list[int]  # the k most likely in descending order, followed by other requested ids
    top_logprobs: list[float]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The result of one step for one request."""

    id: int
    token_ids: list[int]  # new tokens, usually one
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the id that ended it, if finish_reason is STOP; the last of token_ids
    cached_tokens: int | None = None  # set once, with the first output: prompt tokens found in the prefix cache
    queued_seconds: float | None = None  # set once, with the first output: from arrival to first scheduling
    logprobs: list[TokenLogprobs] | None = None  # one per entry of token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # set once: one per prompt token except the first
    vector: bytes | None = None  # the result of a pooling request, one vector or several: float32, little-endian
    error: str | None = None
    num_preemptions: int = 0  # since the previous output
    is_contradiction: bool = False  # `error` says that the request's own restrictions contradict each other


class OffloadStats(msgspec.Struct, array_like=True):
    """KV cache blocks outside the device, in host memory or on disk. Gauges are current; counters are totals."""

    num_blocks: int = 0  # blocks currently stored there
    num_bytes: int = 0
    num_hits: int = 0  # blocks read back
    hit_bytes: int = 0
    num_stored: int = 0
    stored_bytes: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0  # blocks with a wrong checksum or a truncated file
    num_errors: int = 0  # reads and writes that failed

    def add(self, past: OffloadStats) -> OffloadStats:
        """Add the counters of a process that has ended."""
        return OffloadStats(
            self.num_blocks,
            self.num_bytes,
            self.num_hits + past.num_hits,
            self.hit_bytes + past.hit_bytes,
            self.num_stored + past.num_stored,
            self.stored_bytes + past.stored_bytes,
            self.num_evicted + past.num_evicted,
            self.num_corrupt + past.num_corrupt,
            self.num_errors + past.num_errors,
        )


class EPLBStats(msgspec.Struct, array_like=True, frozen=True):
    """What the expert load balancer (`--enable-eplb`) has done. Counters are totals; rows are those that layers counted
    until their latest placement, summed over layers."""

    num_placements: int = 0  # times that experts of a layer were moved
    num_moved: int = 0  # experts whose weights were received
    moved_bytes: int = 0
    mean_rows: float = 0.0  # per rank
    busiest_rows: float = 0.0  # those of each layer's busiest rank
    busiest_rows_after: float = 0.0  # the same, had the experts already been where they were placed then

    def add(self, other: EPLBStats) -> EPLBStats:
        """Add those of another layer, or of another rank of the same engine."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return EPLBStats(*map(sum, pairs))

    def add_counters(self, past: EPLBStats) -> EPLBStats:
        """Add the counters of a process that has ended."""
        return msgspec.structs.replace(
            self,
            num_placements=self.num_placements + past.num_placements,
            num_moved=self.num_moved + past.num_moved,
            moved_bytes=self.moved_bytes + past.moved_bytes,
        )

    def without_rows(self) -> EPLBStats:
        return msgspec.structs.replace(self, mean_rows=0.0, busiest_rows=0.0, busiest_rows_after=0.0)


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """Statistics of the engine after a step. Gauges are current; counters are totals since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks in use by live sequences, 0..1
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # prompt and output tokens computed in this step
    num_drafts: int = 0  # number of times that a step verified drafts of a request
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that became output
    num_forced_tokens: int = 0  # output tokens for which a grammar left no choice, appended without being sampled
    offload_memory: OffloadStats | None = None  # None: no KV is offloaded
    offload_disk: OffloadStats | None = None
    num_deferred: int = 0  # part of num_waiting: overtaken by others
    accepted_by_position: list[int] = []  # num_accepted_tokens by position in the draft
    eplb: EPLBStats | None = None  # None: no experts were placed yet
    # Of these, the drafts that prompt lookup found although there is a draft model.
    num_lookup_drafts: int = 0
    num_lookup_draft_tokens: int = 0
    num_lookup_accepted_tokens: int = 0

    def count_draft(self, num_tokens: int, num_accepted: int, is_looked_up: bool = False) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        if is_looked_up:
            self.num_lookup_drafts += 1
            self.num_lookup_draft_tokens += num_tokens
            self.num_lookup_accepted_tokens += num_accepted
        self.accepted_by_position += [0] * (num_tokens - len(self.accepted_by_position))
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the served model and its memory, sent to the server once, in EngineReady."""

    architecture: str
    max_model_len: int  # prompt and output tokens together
    vocab_size: int  # rows of the embedding: ids 0..vocab_size-1
    block_size: int  # tokens per KV block
    num_kv_blocks: int
    kv_cache_tokens: int
    max_num_seqs: int
    dtype: str
    device: str
    generates: bool = True  # takes requests for tokens
    pooling_task: PoolingTask = "none"
    vector_size: int = 0  # size of the vector of a pooling request
    token_vector_size: int = 0  # size of each vector with `pools_tokens`; 0: not served
    num_offload_blocks: int = 0  # additional blocks in host memory
    directory: str = ""  # the checkpoint
    lora_targets: dict[str, LoRATarget] = {}  # keyed by every name that PEFT may use; empty: adapters are not served
    executor: str = "inprocess"  # what runs the ranks: inprocess, mp or ray
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefix_caching: bool = True
    rank_hosts: list[str] = []  # name of each rank's host; ranks are numbered stage by stage
    draft_source: str = "none"  # method of `--speculative-config`, or the default; for a model, there is lookup, too
