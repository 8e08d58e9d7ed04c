"""Read what sentence-transformers stores with a checkpoint: modules.json and the folders that it names.

They say how hidden states become an embedding. The engine computes it, the server applies the limits on texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_json

PoolingType = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]

_POOLING_TYPES: dict[str, PoolingType] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Flags, in the order in which the resulting vectors are concatenated.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The first of these files that exists holds the transformer's settings.
_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}


class DenseModule(msgspec.Struct, frozen=True):
    """A linear layer on the pooled vector; its weights are in a folder of their own."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str  # "none" | "tanh" | "gelu" | "relu"


class SentenceModules(msgspec.Struct, frozen=True):
    """The modules after the transformer."""

    pooling_types: tuple[PoolingType, ...]  # their vectors are concatenated
    dense: tuple[DenseModule, ...]
    normalize: bool  # scale vectors to length 1
    max_seq_length: int | None  # tokens
    lowercase: bool  # the model reads texts in lower case
    prompt: str  # begins every text


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """Return None if the checkpoint has no modules.json. Raises a ModelError that names what is not supported."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    pooling: tuple[PoolingType, ...] | None = None
    prompt = _read_default_prompt(directory / "config_sentence_transformers.json")
    dense: list[DenseModule] = []
    normalize = False
    limits: dict[str, object] = {}
    for kind, folder in _list_modules(path):
        if normalize:
            raise ModelError(f"{path}: {kind} after Normalize is not supported")
        if kind == "Transformer":
            limits = _read_transformer(directory / folder)
        elif kind == "Pooling":
            pooling = _read_pooling(directory / folder / "config.json", prompt)
        elif kind == "Dense" and pooling is not None:
            dense.append(_read_dense(directory, folder))
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        else:
            raise ModelError(f"{path}: the module {kind} is not supported")
    if pooling is None:
        raise ModelError(f"{path}: there is no module Pooling")
    longest = limits.get("max_seq_length")
    return SentenceModules(
        pooling_types=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_seq_length=longest if isinstance(longest, int) and longest > 0 else None,
        lowercase=limits.get("do_lower_case") is True,
        prompt=prompt,
    )


def _list_modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, object]])
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    listed = []
    for module in modules:
        kind = module.get("type")
        folder = module.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in folder or folder.startswith("/"):
            raise ModelError(f"{path}: each module needs a type, and a path inside the checkpoint")
        listed.append((kind.rpartition(".")[2], folder))
    return listed


def _read_transformer(folder: Path) -> dict[str, object]:
    paths = [folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()]
    return read_json(paths[0]) if paths else {}


def _read_default_prompt(path: Path) -> str:
    config = read_json(path) if path.is_file() else {}
    name = config.get("default_prompt_name")
    prompts = config.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ModelError(f"{path}: default_prompt_name is {name!r}, which is not a text of prompts")
    return prompt


def _read_pooling(path: Path, prompt: str) -> tuple[PoolingType, ...]:
    config = read_json(path)
    if prompt and config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not supported with a default prompt")
    names = config.get("pooling_mode")
    if isinstance(names, str):
        names = [names]
    elif not isinstance(names, list):
        names = [name for flag, name in _POOLING_FLAGS.items() if config.get(flag) is True] or ["mean"]
    types = []
    for name in names:
        if not isinstance(name, str) or name not in _POOLING_TYPES:
            supported = ", ".join(_POOLING_TYPES)
            raise ModelError(f"{path}: pooling_mode {name!r} is not supported (supported: {supported})")
        types.append(_POOLING_TYPES[name])
    return tuple(types)


def _read_dense(directory: Path, folder: str) -> DenseModule:
    path = directory / folder / "config.json"
    config = read_json(path)
    inputs = config.get("in_features")
    outputs = config.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int) or not 0 < inputs * outputs < 2**31:
        raise ModelError(f"{path}: in_features and out_features must be integers above 0")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return DenseModule(folder, inputs, outputs, config.get("bias", True) is True, _ACTIVATIONS[name])
