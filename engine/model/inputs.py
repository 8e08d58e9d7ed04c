"""What one step gives to a decoder: tokens of several sequences, one after the other, and where their KV lives.

`execute/inputs` builds it, `decoder` reads it. Tensors are on the model's device, lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serve_llm.kernels.attention import Lengths

# Added to the positions of a sequence that is longer than `ModelSpec.rope_turns_at`.
TURNED = 1 << 40


@dataclass(frozen=True)
class GroupInputs:
    """Block tables of one KV group (`ModelSpec.kv_groups`, same order)."""

    slots: Tensor  # (tokens,) int64: block * block_size + offset of each token
    block_table: Tensor  # (sequences, max_blocks) int32; entries given back or not yet needed: 0


@dataclass(frozen=True)
class StepInputs:
    ids: Tensor  # (tokens,) int64
    positions: Tensor  # (tokens,) int64, from 0 in each sequence, or from TURNED
    query_starts: list[int]  # sequences + 1 offsets into tokens
    context_lens: list[int]  # tokens of each sequence, those of this step included
    groups: tuple[GroupInputs, ...]
    lengths: Lengths | None = None  # on a GPU: query_starts and context_lens there
