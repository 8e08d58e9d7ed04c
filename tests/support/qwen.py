"""Qwen 1, for which transformers has no class, in plain torch operations: the oracle of the parity tests.

Importing this module registers it, so that transformers' Auto classes find it. It supports sequences of at most
`seq_length` tokens, up to which dynamic NTK and the logarithmic scaling of queries have no effect.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "emb_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "layer_norm_epsilon": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "scale_attn_weights": True,
    "use_cache": True,
    "bf16": False,
    "fp16": False,
    "fp32": False,
    "kv_channels": 128,
    "rotary_pct": 1.0,
    "rotary_emb_base": 10000,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "use_flash_attn": "auto",
    "intermediate_size": 22016,
    "no_bias": True,
    "tie_word_embeddings": False,
    "use_cache_quantization": False,
    "use_cache_kernel": False,
    "softmax_in_fp32": False,
}


class QWenConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "qwen"

    def __init__(self, **values: Any) -> None:
        super().__init__(**{**DEFAULTS, **values})


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, config: QWenConfig, index: int) -> None:
        super().__init__()
        size = config.kv_channels * config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * size)
        self.c_proj = nn.Linear(config.hidden_size, size, bias=not config.no_bias)
        self.heads, self.index = config.num_attention_heads, index
        self.dims, self.base = int(config.kv_channels * config.rotary_pct), config.rotary_emb_base

    def rotate(self, x: Tensor, first: int) -> Tensor:
        """Apply RoPE. x: (sequences, heads, tokens, head_dim), whose first token has position `first`."""
        frequencies = 1.0 / self.base ** (torch.arange(0, self.dims, 2).float() / self.dims)
        angles = torch.outer(torch.arange(first, first + x.shape[2]).float(), frequencies).repeat(1, 2)
        turned, rest = x[..., : self.dims].float(), x[..., self.dims :]
        low, high = turned.chunk(2, -1)
        turned = turned * angles.cos() + torch.cat((-high, low), -1) * angles.sin()
        return torch.cat((turned.type_as(x), rest), -1)

    def forward(self, x: Tensor, cache: DynamicCache) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        first = cache.get_seq_length(self.index)
        key, value = cache.update(self.rotate(key, first), value, self.index)
        scores = self.rotate(query, first) @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
        attention = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).float().softmax(-1).type_as(x)
        return self.c_proj((attention @ value).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        size = config.intermediate_size // 2
        self.w1 = nn.Linear(config.hidden_size, size, bias=not config.no_bias)
        self.w2 = nn.Linear(config.hidden_size, size, bias=not config.no_bias)
        self.c_proj = nn.Linear(size, config.hidden_size, bias=not config.no_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.w1(x) * functional.silu(self.w2(x)))


class Block(nn.Module):
    def __init__(self, config: QWenConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = Attention(config, index)
        self.ln_2 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: DynamicCache) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)


class QWenLMHeadModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = QWenConfig
    base_model_prefix = "transformer"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    _supports_attention_backend = True

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, past_key_values: DynamicCache | None = None, **options: object
    ) -> CausalLMOutputWithPast:
        cache = DynamicCache() if past_key_values is None else past_key_values
        x = self.transformer.wte(input_ids)
        for block in self.transformer.h:
            x = block(x, cache)
        assert cache.get_seq_length() <= self.config.seq_length
        return CausalLMOutputWithPast(logits=self.lm_head(self.transformer.ln_f(x)), past_key_values=cache)


AutoConfig.register("qwen", QWenConfig)
AutoModelForCausalLM.register(QWenConfig, QWenLMHeadModel)
