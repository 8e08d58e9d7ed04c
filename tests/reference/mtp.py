"""Oracle for MTP layers (DeepSeek-V3, arXiv:2412.19437, section 2.2): in float32, without a cache, with the decoder
layer of transformers.

For each token, the layer reads the embedding of the next one and the served model's last hidden state, both normed, and
predicts the token after that. At positions that the served model has not computed, it reads its own normed output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reference.eagle3 import rms_norm


class MTPLayer:
    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """model: from transformers, with the MTP layer as its last layer. tensors: the layer's other tensors."""
        self.tensors = dict(tensors)
        self.eps = float(model.config.rms_norm_eps)
        self.model = model
        self._body = model.model

    def states(self, ids: Sequence[int]) -> Tensor:
        """Return the hidden states of the served model after its final norm: (tokens, hidden_size)."""
        hidden = self._body.embed_tokens(torch.tensor([list(ids)]))
        for layer in self._body.layers[:-1]:
            hidden = self._run(layer, hidden)
        return self._body.norm(hidden)[0]

    def outputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the layer's normed outputs. ids: those after each token. states: (tokens, hidden_size)."""
        embedded = self._norm("enorm", self._body.embed_tokens(ids))
        x = torch.cat((embedded, self._norm("hnorm", states)), dim=-1) @ self.tensors["eh_proj.weight"].T
        return self._norm("shared_head.norm", self._run(self._body.layers[-1], x[None])[0])

    def logits(self, outputs: Tensor) -> Tensor:
        return self.model.lm_head(outputs)

    @torch.no_grad()
    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the most likely next ids in sequence."""
        known = list(ids)
        states = self.states(known[:-1])
        guesses: list[int] = []
        for _ in range(count):
            outputs = self.outputs(torch.tensor(known[1:]), states)
            guesses.append(int(self.logits(outputs[-1:]).argmax()))
            known.append(guesses[-1])
            states = torch.cat((states, outputs[-1:]))
        return guesses

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def _run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        count = hidden.shape[1]
        positions = torch.arange(count)[None]
        mask = None  # linear attention is causal anyway
        if not hasattr(layer, "linear_attn"):
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        result = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._body.rotary_emb(hidden, positions),
        )
        return result[0] if isinstance(result, tuple) else result
