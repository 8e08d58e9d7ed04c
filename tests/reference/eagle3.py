"""Oracle for EAGLE-3 heads (arXiv:2503.01840): the head in float32, without a cache, as plainly as possible.

For each token, the head reads the embedding of the next one and `fc` of three hidden states of the served model, and
predicts the one after that. At positions that the served model has not computed, it reads its own output, before the
last norm, instead of `fc`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Apply RoPE as in Llama. x: (tokens, heads, head_dim), at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half) / half)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


class Head:
    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, object], embedding: Tensor) -> None:
        """tensors: by their names in published checkpoints. embedding: the served model's."""
        self.tensors = dict(tensors)
        self.config = config
        self.embedding = embedding
        self.eps = float(str(config["rms_norm_eps"]))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def fuse(self, states: Tensor) -> Tensor:
        return self._linear("fc", states)

    def outputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the layer's outputs. ids: those after each token. states: (tokens, hidden_size) of each token."""
        hidden = self._norm("midlayer.hidden_norm", states)
        residual = hidden if self.config.get("norm_before_residual") else states
        x = torch.cat((self._norm("midlayer.input_layernorm", self.embedding[ids]), hidden), dim=-1)
        head_dim = int(str(self.config["head_dim"]))
        base = float(str(self.config["rope_theta"]))

        def split(name: str) -> Tensor:
            return self._linear(f"midlayer.self_attn.{name}_proj", x).unflatten(-1, (-1, head_dim))

        query, key, value = rotate(split("q"), base), rotate(split("k"), base), split("v")
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        residual = residual + self._linear("midlayer.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        x = self._norm("midlayer.post_attention_layernorm", residual)
        x = functional.silu(self._linear("midlayer.mlp.gate_proj", x)) * self._linear("midlayer.mlp.up_proj", x)
        return residual + self._linear("midlayer.mlp.down_proj", x)

    def logits(self, outputs: Tensor) -> Tensor:
        return self._linear("lm_head", self._norm("norm", outputs))

    def guess(self, ids: Sequence[int], states: Tensor, count: int) -> list[int]:
        """Return the most likely next ids in sequence. states: (tokens, 3 * hidden_size) of all but the newest id."""
        known = list(ids)
        fused = self.fuse(states)
        guesses: list[int] = []
        for _ in range(count):
            outputs = self.outputs(torch.tensor(known[1:]), fused)
            best = int(self.logits(outputs[-1:]).argmax())
            guesses.append(best + int(self.tensors["d2t"][best]))
            known.append(guesses[-1])
            fused = torch.cat((fused, outputs[-1:]))
        return guesses
