"""Load an EAGLE-3 head into the engine process."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.draft_model.resolve import DraftModelConfig
from serve_llm.engine.model.build import ModelBuilder, WeightLoader, WeightSlice
from serve_llm.engine.model.eagle_head import EagleHead, build_eagle_head
from serve_llm.engine.model.shard import build_rank_shard
from serve_llm.engine.model.weight_map import WeightRule
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.weights.dummy import build_dummy_loader
from serve_llm.engine.weights.files import AnyCheckpoint, open_checkpoint
from serve_llm.engine.weights.load import match_tensors
from serve_llm.engine.weights.parameters import CheckpointLoader, Source
from serve_llm.kernels.registry import Kernels

EMBEDDING = "embedding.weight"
TARGET_IDS = "d2t"  # offset from each draft id to the served model's id
IGNORED = re.compile(r"t2d|.*\.rotary_emb\.inv_freq")  # t2d: which ids the head can draft; redundant with d2t
PREFIXES = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")
LAYER = "midlayer."
# The checkpoint's tensors, without `model.` and with the layer names of its authors -> parameters.
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
    "midlayer.hidden_norm.weight": "layers.0.hidden_norm.weight",
    "midlayer.input_layernorm.weight": "layers.0.attention_norm.weight",
    "midlayer.post_attention_layernorm.weight": "layers.0.ffn_norm.weight",
    "midlayer.self_attn.q_proj.weight": "layers.0.attention.q.weight",
    "midlayer.self_attn.k_proj.weight": "layers.0.attention.k.weight",
    "midlayer.self_attn.v_proj.weight": "layers.0.attention.v.weight",
    "midlayer.self_attn.o_proj.weight": "layers.0.attention.output.weight",
    "midlayer.mlp.gate_proj.weight": "layers.0.ffn.gate.weight",
    "midlayer.mlp.up_proj.weight": "layers.0.ffn.up.weight",
    "midlayer.mlp.down_proj.weight": "layers.0.ffn.down.weight",
}


def load_head(draft: DraftModelConfig, served_directory: Path, kernels: Kernels) -> EagleHead:
    """Return the head with its weights. A head without an embedding uses the served model's. Raises ModelError."""
    config = draft.config
    assert draft.eagle is not None and draft.target is not None, "no head"
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = torch.device(config.device)
    load: WeightLoader
    target_ids = None
    if config.load_format == "dummy":
        load = build_dummy_loader(config.seed, dtype, device)
        if draft.eagle.draft_vocab_size < draft.spec.vocab_size:
            target_ids = torch.arange(draft.eagle.draft_vocab_size, device=device)
    else:
        checkpoint = open_checkpoint(Path(config.directory))
        sources = _match(checkpoint)
        target_ids = _read_target_ids(checkpoint, draft)
        own = CheckpointLoader(checkpoint, sources, dtype, device)
        load = own
        if EMBEDDING not in sources:
            target, weights = draft.target
            served = open_checkpoint(served_directory)
            target, served_sources = match_tensors(served, target, weights, str(served_directory))
            load = _with_embedding(own, CheckpointLoader(served, served_sources, dtype, device))
        target_ids = None if target_ids is None else target_ids.to(device)
    builder = ModelBuilder(
        load, kernels, build_rank_shard(draft.spec, config, 0), ProcessGroups(), dtype=dtype, device=device
    )
    return build_eagle_head(draft.spec, draft.eagle, builder, target_ids)


def _match(checkpoint: AnyCheckpoint) -> dict[str, Source]:
    """Return the tensor of each parameter. Raises ModelError that names missing or unused tensors."""
    sources = {}
    unused = []
    for stored in checkpoint.names:
        found = PREFIXES.match(stored)
        assert found is not None
        name = (LAYER if found[2] else "") + stored[found.end() :]
        parameter = EMBEDDING if name == "embed_tokens.weight" else NAMES.get(name)
        if parameter is not None:
            sources[parameter] = Source(stored, WeightRule(stored, (parameter,)))
        elif name != TARGET_IDS and not IGNORED.fullmatch(name):
            unused.append(stored)
    missing = sorted(name for name, parameter in NAMES.items() if parameter not in sources)
    if missing:
        raise ModelError(f"the checkpoint lacks {', '.join(missing[:5])}")
    if unused:
        raise ModelError(f"no parameter of an EAGLE-3 head uses {', '.join(sorted(unused)[:5])}")
    return sources


def _read_target_ids(checkpoint: AnyCheckpoint, draft: DraftModelConfig) -> Tensor | None:
    """See `EagleHead`. Raises ModelError if they are not different ids of the served model."""
    assert draft.eagle is not None
    size = draft.eagle.draft_vocab_size
    if TARGET_IDS not in checkpoint.names:
        if size < draft.spec.vocab_size:
            raise ModelError(f"the checkpoint lacks {TARGET_IDS}, which says for which ids the head's {size:,} stand")
        return None
    offsets = checkpoint.read(TARGET_IDS)
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise ModelError(f"{TARGET_IDS} must be {size:,} whole numbers, as draft_vocab_size in config.json says")
    ids = torch.arange(size) + offsets.long()
    if len(set(ids.tolist())) < size or int(ids.min()) < 0 or int(ids.max()) >= draft.spec.vocab_size:
        raise ModelError(f"{TARGET_IDS} does not name {size:,} different ids below {draft.spec.vocab_size:,}")
    return ids


def _with_embedding(own: WeightLoader, served: WeightLoader) -> WeightLoader:
    def load(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return (served if name == EMBEDDING else own)(name, shape, part, dtype)

    return load
