"""Predict the memory that a draft model takes on the ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serve_llm.cli.plan.parameters import LinearWeight
from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.hub import resolve_config
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.resolve import (
    DraftModelConfig,
    check_tokenizers,
    count_cache_bytes,
    resolve_draft_model,
)
from serve_llm.engine.model.eagle_spec import NUM_STATES, EagleSpec
from serve_llm.engine.model.mtp_spec import MTPSpec
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AttentionSpec, ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout


def read_draft_model(options: EngineOptions, config: Config, raw: Mapping[str, object]) -> DraftModelConfig | None:
    """Read the draft model that the options name; None without one.

    config, raw: the served model's settings and config.json. Raises ModelError and OptionError if the server refuses
    the draft model.
    """
    if config.speculation is None or not config.speculation.has_draft_model:
        return None
    model = config.speculation.model
    revision = config.speculation.revision
    directory = Path(config.directory) if model is None else resolve_config(model, revision, options.download_dir)
    if not config.speculation.reads_hidden_states and _have_tokenizers(options, config, directory):
        check_tokenizers(options, Path(config.directory), directory)
    return resolve_draft_model(options, config, directory, raw)


def count_draft_bytes(
    draft: DraftModelConfig | None, memory: int, layout: ParallelLayout | None = None, rank: int = 0
) -> int:
    """Bytes of the draft model on a rank, including its KV cache. The whole model is beside the first rank; if it is on
    the ranks, each one of the last stage holds a shard.

    memory: bytes of the device; on a CPU, this rank's share of them. layout: of the served model, by default one rank.
    """
    layout = layout or ParallelLayout()
    if draft is not None and draft.is_on_ranks:
        return _count_shard_bytes(draft, memory, layout, rank)
    if draft is None or rank:
        return 0
    config = draft.config
    if draft.mtp is not None:
        weights = _count_mtp_bytes(draft.mtp, config.element_bytes, config.device)
        return weights + count_cache_bytes(draft, max(0, memory - weights))
    shard = Shard(ParallelLayout(), 0, range(len(draft.spec.layers)))
    weights = weight_bytes(draft.spec, shard, draft.config.element_bytes, config.device).held
    if draft.eagle is not None:
        weights += _count_other_bytes(draft.spec, draft.eagle, draft.config.element_bytes, draft.config.device)
    return weights + count_cache_bytes(draft, max(0, memory - weights))


def _count_shard_bytes(draft: DraftModelConfig, memory: int, layout: ParallelLayout, rank: int) -> int:
    if rank not in layout.tp_group(layout.output_rank):
        return 0
    tp_rank = layout.tp_rank(rank)
    shard = Shard(ParallelLayout(layout.tp_size), tp_rank, range(len(draft.spec.layers)))
    weights = weight_bytes(draft.spec, shard, draft.config.element_bytes, draft.config.device).held
    return weights + count_cache_bytes(draft, max(0, memory - weights), layout.tp_size, tp_rank)


def _have_tokenizers(options: EngineOptions, config: Config, draft_directory: Path) -> bool:
    """Whether the tokenizers of both models are available: for a model on the Hub, only config.json is read."""
    if options.tokenizer is not None or not config.directory:
        return False
    return all((path / "tokenizer.json").is_file() for path in (Path(config.directory), draft_directory))


def _count_mtp_bytes(mtp: MTPSpec, element_bytes: int, device: str) -> int:
    """Bytes of the layer, the embedding, the LM head, the final norm, and the parts that a decoder layer lacks."""
    shard = Shard(ParallelLayout(), 0, range(mtp.layer, mtp.layer + 1))
    width = mtp.model.hidden_size
    projection = LinearWeight(width, 2 * width).held_bytes(element_bytes, device, fp8=False)
    return weight_bytes(mtp.model, shard, element_bytes, device).held + 3 * width * element_bytes + projection


def _count_other_bytes(spec: ModelSpec, eagle: EagleSpec, element_bytes: int, device: str) -> int:
    """Bytes of an EAGLE-3 head that a one-layer decoder lacks, minus those that the decoder has and the head lacks."""

    def held(outputs: int, inputs: int) -> int:
        return LinearWeight(outputs, inputs).held_bytes(element_bytes, device, fp8=False)

    width = spec.hidden_size
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    embeddings = held(rows, 2 * width) - held(rows, width)  # their part of the input of queries, keys and values
    fused = held(width, NUM_STATES * eagle.target_hidden_size)
    unused = held(spec.vocab_size, width) - held(eagle.draft_vocab_size, width)
    return embeddings + fused + width * element_bytes - unused
