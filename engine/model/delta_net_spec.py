"""Gated DeltaNet (arXiv:2412.06464), a mixer with a state instead of KV. Torch-free; part of `engine.model.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

STATE_UNIT = 16  # a row of the state is padded to a multiple of this, as `kernels.delta_rule` expects


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """A causal convolution over queries, keys and values, then the gated delta rule, then a gated norm.

    Its heads are value heads; each key head, with its queries, serves several of them, as a KV head serves query heads.
    The state of a sequence is the last inputs of the convolution and one float32 matrix per head. It includes no
    drafts: their inputs are kept next to it until they are accepted or rejected.
    """

    num_heads: int
    num_kv_heads: int  # heads of keys and queries
    key_dim: int  # numbers of a head's key or query
    value_dim: int  # numbers of a head's value
    conv_kernel: int  # tokens that the convolution reads, including the newest
    norm_eps: float  # RMS norm of every head's output
    interleaved_key_heads: bool = False  # a key head serves every num_kv_heads-th head, not consecutive ones

    rope: ClassVar[None] = None
    rope_dim: ClassVar[int] = 0
    sliding_window: ClassVar[None] = None
    causal: ClassVar[bool] = True

    def find_key_head(self, head: int) -> int:
        """Return the key head that serves a head."""
        return head % self.num_kv_heads if self.interleaved_key_heads else head // (self.num_heads // self.num_kv_heads)

    def count_channels(self, heads: int, key_heads: int) -> int:
        """Numbers that the convolution reads for each token, given the number of heads."""
        return 2 * key_heads * self.key_dim + heads * self.value_dim

    def count_state(self, heads: int, key_heads: int, num_drafts: int = 0) -> int:
        """Float32 numbers in a sequence's state and in the inputs of `num_drafts` drafts, given the number of heads."""
        row = -(-self.value_dim // STATE_UNIT) * STATE_UNIT
        channels = self.count_channels(heads, key_heads)
        return (self.conv_kernel - 1) * channels + heads * self.key_dim * row + num_drafts * (channels + 2 * heads)
