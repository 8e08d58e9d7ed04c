"""A model in transformers' own code, for architectures that no family file describes: from a checkpoint to a decoder.

The slow path. The libraries that are imported here take seconds: import this where it is needed. Code that comes with a
checkpoint is never run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from serve_llm.engine.errors import ModelError, OptionError, UnsupportedModel
from serve_llm.engine.model import trial
from serve_llm.engine.model.pretrained import PretrainedDecoder, pack_linears
from serve_llm.engine.model.spec import PretrainedSpec
from serve_llm.kernels.table import choose

logger = logging.getLogger(__name__)


def read_pretrained(directory: Path, max_model_len: int | None) -> PretrainedSpec:
    """What config.json says. max_model_len: as the user gave it.

    Raises UnsupportedModel for a model that cannot be served so, as far as it is known before a weight is read;
    OptionError where another --max-model-len is needed.
    """
    config = _config(directory)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if config.is_encoder_decoder or kind is None:
        _refuse(_name(config), "transformers has no decoder-only language model for it")
    if kind._is_stateful or not kind.is_backend_compatible():
        _refuse(_name(config), "it keeps another state than keys and values, or takes no attention by name")
    if getattr(config, "quantization_config", None):
        _refuse(_name(config), "its checkpoint is quantised")
    text = config.get_text_config(decoder=True)
    if not all(isinstance(getattr(text, name, None), int) for name in ("vocab_size", "num_hidden_layers")):
        _refuse(kind.__name__, "config.json does not say vocab_size and num_hidden_layers")
    longest = getattr(text, "max_position_embeddings", None) or max_model_len
    if longest is None:
        raise OptionError("--max-model-len: config.json does not say how long a sequence may be; give it")
    _check_rope(text, max_model_len or longest)
    return PretrainedSpec(
        architecture=kind.__name__,
        vocab_size=text.vocab_size,
        max_position=longest,
        layers=range(text.num_hidden_layers),
    )


def load_pretrained(
    directory: Path,
    spec: PretrainedSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> PretrainedDecoder:
    """The model with weights of `dtype` on `device`. load_format, seed: as `place.load_model` has them.

    Raises ModelError when the checkpoint cannot be read or lacks weights, UnsupportedModel when a trial of the model
    finds something that cannot be served.
    """
    transformers.logging.set_verbosity_error()  # what matters of it is said here
    transformers.logging.disable_progress_bar()
    config = _config(directory)
    try:
        model = _dummy(config, dtype, seed) if load_format == "dummy" else _read(directory, config, dtype)
    except (ModelError, MemoryError, RuntimeError):  # torch lacks memory by a RuntimeError
        raise
    except Exception as error:  # by whatever class reads it
        raise ModelError(f"transformers cannot load {directory}: {_line(error)}") from error
    model = model.eval().requires_grad_(False).to(device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    logger.info("Weights: %.2f MiB", num_bytes / 2**20)
    found = trial.run_trial(model, spec.vocab_size, max_model_len)
    kernels = choose(device, dtype, {place.head_dim for place in found.places.values()})
    for part in (found.body, found.head):
        pack_linears(part, found.linears, kernels, dtype)
    return PretrainedDecoder(found.body, found.head, found.places, kernels, dtype)


def _config(directory: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # by whatever class reads it
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cannot read {directory / 'config.json'}: {_line(error)}"
        ) from error
    return config


def _dummy(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=trial.NAME)


def _read(directory: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model, found = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=trial.NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named below
    )
    if missing := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise ModelError(f"{directory}: the checkpoint lacks {missing[0]}, or has it in another shape")
    if unused := sorted(found["unexpected_keys"]):
        logger.warning("%d tensors of the checkpoint are used by nothing, such as %s", len(unused), unused[0])
    return model


def _check_rope(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises OptionError where transformers would turn all sequences of a step by what its longest one needs."""
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
