"""Loading a model in transformers' own code, for architectures without a family file.

Importing this module takes seconds, so import it lazily. Code in a checkpoint is never executed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from serve_llm.common.errors import ModelError, OptionError, UnsupportedModel
from serve_llm.common.gguf.checkpoint import LINK
from serve_llm.engine.hf_backend import probe
from serve_llm.engine.hf_backend.decoder import TransformersDecoder, pack_linears
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.weights.load import refuse_unavailable_backend
from serve_llm.kernels.backends.backend import AttentionForm
from serve_llm.kernels.registry import choose

logger = logging.getLogger(__name__)


def read_transformers_spec(directory: Path, max_model_len: int | None) -> TransformersSpec:
    """Read config.json. max_model_len: the option as given.

    Raises UnsupportedModel for a model that cannot be served this way, if that is known before weights are read;
    OptionError if another --max-model-len is needed.
    """
    if (directory / LINK).is_file():
        raise OptionError("--model-impl: transformers' own code is served from safetensors, not from GGUF; omit it")
    config = _config(directory)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if config.is_encoder_decoder or kind is None:
        _refuse(_name(config), "transformers has no decoder-only language model for it")
    if kind._is_stateful:
        _refuse(_name(config), "it keeps a state other than keys and values, which our KV cache does not hold")
    if not kind.is_backend_compatible():
        _refuse(_name(config), "its attention is its own and cannot be replaced by ours")
    if getattr(config, "quantization_config", None):
        _refuse(_name(config), "its checkpoint is quantised")
    text = config.get_text_config(decoder=True)
    if not all(isinstance(getattr(text, name, None), int) for name in ("vocab_size", "num_hidden_layers")):
        _refuse(kind.__name__, "config.json does not say vocab_size and num_hidden_layers")
    longest = getattr(text, "max_position_embeddings", None) or max_model_len
    if longest is None:
        raise OptionError("--max-model-len: config.json does not say how long a sequence may be; give it")
    _check_rope(text, max_model_len or longest)
    return TransformersSpec(
        architecture=kind.__name__,
        vocab_size=text.vocab_size,
        max_position=longest,
        layers=range(text.num_hidden_layers),
        config=config,
    )


def load_transformers_model(
    directory: Path,
    spec: TransformersSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    attention_backend: str = "auto",
    cache_dtype: torch.dtype | None = None,
) -> TransformersDecoder:
    """The model with weights of `dtype` on `device`. load_format, seed: see `weights.load.load_model`.
    attention_backend, cache_dtype: see `kernels.registry.choose`.

    Raises ModelError when the checkpoint cannot be read or lacks weights, UnsupportedModel when the probe
    finds something that cannot be served, OptionError if the attention backend cannot be used.
    """
    transformers.logging.set_verbosity_error()  # this module reports the relevant problems
    transformers.logging.disable_progress_bar()
    config = spec.config
    assert isinstance(config, PreTrainedConfig)
    try:
        model = _dummy(config, dtype, seed) if load_format == "dummy" else _read(directory, config, dtype)
    except (ModelError, MemoryError, RuntimeError):  # torch reports out of memory as a RuntimeError
        raise
    except Exception as error:  # any class may read it
        raise ModelError(f"transformers cannot load {directory}: {_line(error)}") from error
    model = model.eval().requires_grad_(False).to(device)
    result = probe.probe_model(model, spec.vocab_size, max_model_len)
    shapes = list(result.attention_shapes.values())
    forms = {AttentionForm(shape.head_dim, has_window=shape.window is not None) for shape in shapes}
    with refuse_unavailable_backend(attention_backend):
        kernels = choose(
            device,
            dtype,
            {shape.head_dim for shape in shapes},
            attention_forms=forms,
            attention_backend=attention_backend,
            cache_dtype=cache_dtype,
        )
    for part in (result.body, result.head):
        pack_linears(part, result.linears, kernels, dtype)
    return TransformersDecoder(result.body, result.head, result.attention_shapes, kernels, dtype)


def _config(directory: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any class may read it
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cannot read {directory / 'config.json'}: {_line(error)}"
        ) from error
    return config


def _dummy(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=probe.NAME)


def _read(directory: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=probe.NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below
    )
    if missing := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ModelError(f"{directory}: the checkpoint lacks {missing[0]}, or has it in another shape")
    if unused := sorted(info["unexpected_keys"]):
        logger.warning("%d tensors of the checkpoint are used by nothing, such as %s", len(unused), unused[0])
    return model


def _check_rope(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raise OptionError if transformers would choose the rotation of all sequences in a step by the longest one."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_model_len > trained:
                raise OptionError(
                    f"--max-model-len: longrope is served by transformers' own code up to {trained} tokens, where its "
                    f"factors change for all requests at once; give at most {trained}"
                )


def _name(config: PreTrainedConfig) -> str:
    return str((config.architectures or [type(config).__name__])[0])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse(architecture: str, why: str) -> NoReturn:
    raise UnsupportedModel(f"{architecture} cannot be served by transformers' own code: {why}")
