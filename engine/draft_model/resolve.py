"""Resolve the draft model that the options name; its settings depend on those of the served model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import read_config, resolve_draft_checkpoint, resolve_tokenizer
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.speculative import NO_DRAFTS
from serve_llm.common.tokenizer_files import find_tokenizer
from serve_llm.engine.config import Config, resolve
from serve_llm.engine.model.eagle_spec import EagleSpec, read_eagle
from serve_llm.engine.model.mtp_spec import MTPSpec, read_mtp
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.headers import find_checkpoint_dtype
from serve_llm.engine.worker import kv_cache

CACHE_SHARE = 0.1  # largest share of the free memory for the draft model's KV cache


@dataclass(frozen=True)
class DraftModelConfig:
    """The settings of a draft model that is not loaded yet."""

    config: Config
    spec: ModelSpec
    weights: WeightMap | None  # None for an EAGLE-3 head and an MTP layer
    eagle: EagleSpec | None = None  # set for an EAGLE-3 head
    target: tuple[ModelSpec, WeightMap] | None = None  # the model that an EAGLE-3 head is for
    mtp: MTPSpec | None = None  # set for an MTP layer
    is_on_ranks: bool = False  # the served model's ranks hold its shards; otherwise it runs in the engine's process


def resolve_draft_model(
    options: EngineOptions, served: Config, directory: Path, served_raw: Mapping[str, object] | None = None
) -> DraftModelConfig:
    """Resolve the draft model in `directory`. served: the settings of the model whose ids it drafts. served_raw: that
    model's config.json, if it is not in its directory.

    Raises ModelError and OptionError, which name the draft model.
    """
    speculation = options.speculation
    assert speculation is not None, "no speculation"
    try:
        if speculation.reads_hidden_states:
            served_raw = served_raw or read_config(Path(served.directory))
            return _resolve_head(options, served, directory, served_raw)
        return _resolve(options, served, directory)
    except (ModelError, OptionError) as error:
        what = "" if speculation.model is None else f"the draft model {speculation.model}: "
        raise type(error)(f"--speculative-config: {what}{error}") from None


def _resolve(options: EngineOptions, served: Config, directory: Path) -> DraftModelConfig:
    raw = read_config(directory)
    spec, weights = read_model(raw)
    if spec.is_encoder or not served.generates:
        raise ModelError(f"{spec.architecture} generates no text")
    if spec.has_states:
        raise ModelError(
            f"{spec.architecture} has linear attention, which a draft model must not have; use another model"
        )
    config = _resolve_config(options, served, directory, raw, spec)
    # Beyond the longrope threshold, all keys would have to be computed again.
    longest = min(served.max_model_len, spec.max_position, spec.long_rope_threshold or spec.max_position)
    config = replace(config, max_model_len=longest)
    is_on_ranks = config.tensor_parallel_size > 1 or _has_device_on_ranks_only(served)
    if is_on_ranks and config.tensor_parallel_size != served.tensor_parallel_size:
        raise OptionError(
            "the draft model runs in the engine's process, to which Ray assigns no GPU; set draft_tensor_parallel_size "
            f"to {served.tensor_parallel_size}, so that the ranks hold it, or use --distributed-executor-backend mp or "
            "method ngram"
        )
    return DraftModelConfig(config, apply_engine_config(spec, config), weights, is_on_ranks=is_on_ranks)


def _has_device_on_ranks_only(served: Config) -> bool:
    """Whether the engine's process has no device: Ray assigns GPUs to ranks."""
    return served.executor_backend == "ray" and served.device == "cuda"


def _resolve_head(
    options: EngineOptions, served: Config, directory: Path, served_raw: Mapping[str, object]
) -> DraftModelConfig:
    """Resolve an EAGLE-3 head, or the MTP layer of the served model."""
    if _has_device_on_ranks_only(served):
        raise OptionError(
            "a head or MTP layer runs in the engine's process, to which Ray assigns no GPU; use "
            "--distributed-executor-backend mp, or method ngram or draft_model"
        )
    if options.model_impl == "transformers":
        raise OptionError("transformers' own code does not give out hidden states; omit --model-impl")
    if served.device == "cuda" and not served.enforce_eager:
        raise OptionError("captured CUDA graphs do not give out hidden states; add --enforce-eager")
    assert options.speculation is not None, "no speculation"
    if options.speculation.reads_last_states:
        return _resolve_mtp(options, served, served_raw)
    raw = read_config(directory)
    target = read_model(served_raw, options.allow_unknown_config)
    spec, eagle = read_eagle(raw, target[0])
    options = replace(options, dtype=served.dtype, quantization="auto", allow_unknown_config=())
    config = _resolve_config(options, served, directory, raw, spec)
    # Rope works beyond the length on which heads are trained, which is often short.
    config = replace(config, max_model_len=served.max_model_len, enforce_eager=True)
    return DraftModelConfig(config, apply_engine_config(spec, config), None, eagle, target)


def _resolve_mtp(options: EngineOptions, served: Config, raw: Mapping[str, object]) -> DraftModelConfig:
    """raw: the served model's config.json."""
    mtp = read_mtp(raw, options.allow_unknown_config)
    options = replace(options, dtype=served.dtype)
    config = _resolve_config(options, served, Path(served.directory), dict(raw), mtp.draft)
    config = replace(config, max_model_len=served.max_model_len, enforce_eager=True)
    mtp = replace(mtp, model=apply_engine_config(mtp.model, config))
    return DraftModelConfig(config, mtp.draft, None, mtp=mtp)


def _resolve_config(
    options: EngineOptions, served: Config, directory: Path, raw: dict[str, object], spec: ModelSpec
) -> Config:
    assert options.speculation is not None, "no speculation"
    own = replace(
        options,
        tensor_parallel_size=options.speculation.draft_tensor_parallel_size,
        tensor_parallel_split=None,
        pipeline_parallel_size=1,
        pipeline_parallel_layers=None,
        enable_expert_parallel=False,
        enable_eplb=False,
        eplb_config=None,
        all_reduce="nccl",
        enable_lora=False,
        speculative_config=NO_DRAFTS,
        kv_cache_memory=None,
        max_model_len=None,
    )
    config = resolve(
        own,
        str(directory),
        device=served.device,
        checkpoint_dtype=find_checkpoint_dtype(raw, directory)[0],
        model_max_len=spec.max_position,
        vocab_size=spec.vocab_size,
        stores_int8=spec.int8 is not None,
        stores_integers=spec.stores_integers,
        executor_backend="inprocess",
        data_parallel_rank=served.data_parallel_rank,
    )
    return replace(config, async_scheduling=False)


def count_cache_bytes(draft: DraftModelConfig, free: int, tensor_parallel_size: int = 1, tp_rank: int = 0) -> int:
    """Return the bytes of the draft model's KV cache on a rank: at least one full request, at most a share of `free`
    bytes."""
    config = draft.config
    shard = Shard(ParallelLayout(tensor_parallel_size), tp_rank, range(len(draft.spec.layers)))
    empty = kv_cache.plan_empty_cache(draft.spec, shard, config)
    request_bytes = empty.block_bytes * empty.blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
    num_requests = min(kv_cache.CPU_CONCURRENCY, config.max_num_seqs)
    return max(request_bytes, min(num_requests * request_bytes, int(CACHE_SHARE * free)))


def find_draft_directory(options: EngineOptions) -> Path:
    """Find the checkpoint of a draft model, which is separate from the served model's. Raises ModelError."""
    speculation = options.speculation
    assert speculation is not None and speculation.model is not None, "no draft model"
    with_weights = options.load_format == "auto"
    return resolve_draft_checkpoint(speculation.model, speculation.revision, options.download_dir, weights=with_weights)


def check_tokenizers(options: EngineOptions, served_directory: Path, draft_directory: Path) -> None:
    """Raise ModelError unless each id that both models have is the same token. The draft model never sees text, so its
    tokenizer matters in no other way."""
    speculation = options.speculation
    assert speculation is not None, "no speculation"
    if options.tokenizer is not None:
        served_directory = resolve_tokenizer(options.tokenizer, options.download_dir)
    served = (find_tokenizer(served_directory) / "tokenizer.json").read_text(encoding="utf-8")
    draft = (find_tokenizer(draft_directory) / "tokenizer.json").read_text(encoding="utf-8")
    if served == draft:
        return
    tokens = {token_id: token for token, token_id in Tokenizer.from_str(served).get_vocab().items()}
    differing = []
    for token, token_id in Tokenizer.from_str(draft).get_vocab().items():
        if tokens.get(token_id, token) != token:
            differing.append((token_id, token))
    if differing:
        token_id, token = min(differing)
        raise ModelError(
            f"--speculative-config: the draft model {speculation.model} has another tokenizer: {len(differing):,} ids "
            f"are different tokens; {token_id} is {tokens[token_id]!r} in the model and {token!r} in the draft model; "
            "use one of the same family"
        )
