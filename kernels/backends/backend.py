"""What a model requires of a GPU's kernels, and what a backend offers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, order=True)
class AttentionForm:
    """A kind of paged attention that a model's layers need; see `kernels.attention.paged_attention`."""

    head_dim: int
    value_dim: int | None = None  # None except in a latent cache
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False


@dataclass(frozen=True)
class BackendRequirements:
    """The device, and what the model needs there."""

    device: torch.device
    dtype: torch.dtype  # activations have it
    capability: tuple[int, int] | None  # compute capability of the GPU; None if torch sees none
    attention_forms: Collection[AttentionForm] = ()
    batch_invariant: bool = False
    cache_dtype: torch.dtype | None = None  # the KV cache has it; None: as dtype


Offer = Mapping[str, Any] | str  # kernels by field name of `registry.Kernels`, or the reason why there are none


@dataclass(frozen=True)
class AttentionBackend:
    name: str  # in the log
    option: str  # value of --attention-backend
    offer: Callable[[BackendRequirements], Offer]


class UnavailableBackend(Exception):
    """The requested backend cannot be used. The message says why."""
