"""The inputs of one step of a decoder: tokens of several sequences, one after the other, and where their KV is cached.

`worker.input_batch` builds them. Tensors are on the model's device, lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.delta_rule import DraftCounts
from serve_llm.kernels.rope import Angles

# Added to the positions of a sequence that is longer than `ModelSpec.long_rope_threshold`.
LONG_ROPE_OFFSET = 1 << 40


@dataclass(frozen=True)
class ChunkInputs:
    """The step's queries as chunked attention sees them: the queries of one chunk of a sequence are a sequence of their
    own, which begins with the chunk. The tokens and their order are those of the step."""

    query_starts: list[int]
    context_lens: list[int]
    lengths: Lengths | None = None  # as in `StepInputs`


@dataclass(frozen=True)
class KVGroupInputs:
    """Block tables of one KV group (`ModelSpec.kv_groups`, same order)."""

    slots: Tensor  # (tokens,) int64: block * block_size + offset of each token
    block_table: Tensor  # (sequences, max_blocks) int32; 0 for freed and for unused entries; sequences as in `chunks`
    chunks: ChunkInputs | None = None  # for chunked groups


NO_KV = KVGroupInputs(torch.empty(0, dtype=torch.int64), torch.empty((0, 0), dtype=torch.int32))


@dataclass(frozen=True)
class StateCall:
    """A part of a step with states, which ends where a snapshot of a state is stored: consecutive tokens of different
    sequences, whose lists and lengths are as in `StepInputs`."""

    tokens: range  # indices in the step
    slots: list[int]
    query_starts: list[int]
    context_lens: list[int]
    drafts: DraftCounts | None
    lengths: Lengths | None
    snapshot: int | None  # where to copy the state of the last slot to; None: nowhere


@dataclass(frozen=True)
class StepInputs:
    ids: Tensor  # (tokens,) int64
    positions: Tensor  # (tokens,) int64, counted from 0 in each sequence, or from LONG_ROPE_OFFSET
    query_starts: list[int]  # sequences + 1 offsets into tokens
    context_lens: list[int]  # tokens of each sequence, those of this step included
    groups: tuple[KVGroupInputs, ...]
    lengths: Lengths | None = None  # query_starts and context_lens on the device, for steps that may be captured
    token_types: Tensor | None = None  # (tokens,) int64, for models that have them
    state_calls: tuple[StateCall, ...] = ()  # in models with states, to be computed one after the other
    adapter_slots: Tensor | None = None  # (tokens,) int64, in captured steps with adapters: -1 for a token without one


def add_states(inputs: StepInputs, slots: list[int], drafts: DraftCounts | None = None) -> StepInputs:
    """Add the slots of the sequences' states, of which no snapshots are stored. drafts: None if there are none."""
    tokens = range(len(inputs.ids))
    call = StateCall(tokens, slots, inputs.query_starts, inputs.context_lens, drafts, inputs.lengths, None)
    return replace(inputs, state_calls=(call,))


class AttentionInputs(NamedTuple):
    """What the attention of one layer reads besides hidden states."""

    step: StepInputs
    group: KVGroupInputs  # inputs of the layer's KV group; NO_KV for a layer that caches no KV
    # The layer's KV cache, as `kernels.attention.write_cache` expects it, or the states of sequences, (slots, numbers)
    # float32; written in place.
    cache: Tensor
    angles: Angles | None  # None: a layer without rope
    query_scale: Tensor | None = None  # (tokens,) float32, for a layer with a query temperature
