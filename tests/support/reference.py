"""transformers' results for a checkpoint: the oracle of the parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@lru_cache(maxsize=2)
def reference_model(directory: Path, dtype: str = "float32") -> PreTrainedModel:
    """Load the checkpoint in `directory`, converted to `dtype`, with the simplest attention and experts."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), **plain).eval()


@torch.inference_mode()
def reference_logprobs(directory: Path, ids: Sequence[int], dtype: str = "float32") -> Tensor:
    """Return the logprobs after each id, from one forward pass: (ids, vocab_size) float32."""
    logits = reference_model(directory, dtype)(torch.tensor([list(ids)])).logits
    return logits[0].float().log_softmax(-1)


@torch.inference_mode()
def reference_greedy(directory: Path, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return the most likely continuation, token by token with transformers' own cache, and its logprobs, in float32.

    No id ends it.
    """
    model = reference_model(directory)
    ids: list[int] = []
    logprobs: list[float] = []
    result = model(torch.tensor([list(prompt_ids)]), use_cache=True)
    for _ in range(num_tokens):
        row = result.logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
        result = model(torch.tensor([ids[-1:]]), past_key_values=result.past_key_values, use_cache=True)
    return ids, logprobs
