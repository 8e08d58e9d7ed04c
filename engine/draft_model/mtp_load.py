"""Load an MTP layer into the engine process."""

from __future__ import annotations

from pathlib import Path

import torch

from serve_llm.engine.draft_model.resolve import DraftModelConfig
from serve_llm.engine.model.build import ModelBuilder
from serve_llm.engine.model.mtp_head import MTPHead, build_mtp_head
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.load import open_weights
from serve_llm.kernels.registry import Kernels


def load_mtp_head(draft: DraftModelConfig, kernels: Kernels) -> MTPHead:
    """Return the MTP layer, with the served model's embedding, final norm and LM head. Raises ModelError."""
    config = draft.config
    mtp = draft.mtp
    assert mtp is not None, "no MTP layer"
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = torch.device(config.device)
    opened = open_weights(
        Path(config.directory), mtp.model, mtp.weights, dtype, device, config.load_format, config.seed
    )
    spec = opened.spec
    shard = Shard(ParallelLayout(), 0, range(mtp.layer, mtp.layer + 1))
    builder = ModelBuilder(
        opened.load,
        kernels,
        shard,
        ProcessGroups(),
        spec.int8,
        spec.fp8,
        spec.grouped,
        opened.load_grouped,
        dtype,
        device,
    )
    head = build_mtp_head(spec, builder)
    if opened.checkpoint is not None:
        opened.checkpoint.release()
    return head
