"""Read what sentence-transformers stores with a checkpoint: modules.json and the folders that it names.

They say how hidden states become an embedding. The engine computes it, the server applies the limits on texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_json

PoolingType = Literal["cls", "mean", "last"]

_POOLING_KEYS: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
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

    pooling_type: PoolingType
    dense: tuple[DenseModule, ...]
    normalize: bool  # scale vectors to length 1
    max_seq_length: int | None  # tokens
    lowercase: bool  # the model reads texts in lower case


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """None if the checkpoint has no modules.json. Raises ModelError that names what is not supported."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    pooling: PoolingType | None = None
    dense: list[DenseModule] = []
    normalize = False
    limits: dict[str, object] = {}
    for kind, folder in _list_modules(path):
        if normalize:
            raise ModelError(f"{path}: {kind} after Normalize is not supported")
        if kind == "Transformer":
            limits = _read_optional(directory / folder / "sentence_bert_config.json")
        elif kind == "Pooling":
            pooling = _read_pooling(directory / folder / "config.json")
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
        pooling_type=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_seq_length=longest if isinstance(longest, int) and longest > 0 else None,
        lowercase=limits.get("do_lower_case") is True,
    )


def _list_modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, object]])
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    listed = []
    for module in modules:
        kind, folder = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in folder or folder.startswith("/"):
            raise ModelError(f"{path}: each module needs a type, and a path inside the checkpoint")
        listed.append((kind.rpartition(".")[2], folder))
    return listed


def _read_optional(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(path: Path) -> PoolingType:
    config = read_json(path)
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not supported")
    name = config.get("pooling_mode")
    if isinstance(name, str):
        chosen = [name]
        if name in _POOLING_NAMES:
            return _POOLING_NAMES[name]
    else:
        chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        if len(chosen) == 1 and chosen[0] in _POOLING_KEYS:
            return _POOLING_KEYS[chosen[0]]
    supported = ", ".join(_POOLING_KEYS)
    raise ModelError(
        f"{path}: pooling by {' and '.join(chosen) or 'nothing'} is not supported (supported: {supported})"
    )


def _read_dense(directory: Path, folder: str) -> DenseModule:
    path = directory / folder / "config.json"
    config = read_json(path)
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int) or not 0 < inputs * outputs < 2**31:
        raise ModelError(f"{path}: in_features and out_features must be integers above 0")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return DenseModule(folder, inputs, outputs, config.get("bias", True) is True, _ACTIVATIONS[name])
