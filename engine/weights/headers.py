"""The dtype of a checkpoint's weights, from config.json or else from the headers of its files. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from serve_llm.common.errors import ModelError
from serve_llm.engine.config import read_config_dtype

ASSUMED = "float32"  # as in transformers, if nothing else determines the dtype
ASSUMED_IF_QUANTISED = "bfloat16"  # a quantised checkpoint rarely keeps its other weights in float32
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' name -> torch's
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}  # bytes
KINDS = ("weight", "bias")  # last part of the names of tensors in the model's dtype; scales have other dtypes


def find_checkpoint_dtype(raw: Mapping[str, object], directory: Path | None) -> tuple[str, str]:
    """Return the dtype of the weights, such as "bfloat16", and its source if that is not config.json, else "".

    raw: config.json. directory: the checkpoint; its safetensors are read if config.json names no dtype. None if there
    are only config.json and no weights. Raises ModelError if a file cannot be read.
    """
    if (named := read_config_dtype(raw)) is not None:
        return named, ""
    if (stored := _read_stored_dtype(directory) if directory is not None else None) is not None:
        return stored, "that of most weights: config.json names none"
    assumed = ASSUMED_IF_QUANTISED if raw.get("quantization_config") else ASSUMED
    return assumed, "an assumption: config.json names none, and no safetensors tell it; see --dtype"


def _read_stored_dtype(directory: Path) -> str | None:
    """Return the floating-point dtype with the most bytes of weights; None if there is none."""
    import safetensors

    num_bytes: Counter[str] = Counter()
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    tensor = file.get_slice(name)
                    dtype = tensor.get_dtype()
                    if dtype in NAMES and name.rpartition(".")[2] in KINDS:
                        num_bytes[NAMES[dtype]] += math.prod(tensor.get_shape()) * WIDTHS[dtype]
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}; copy or download it again") from error
    return num_bytes.most_common(1)[0][0] if num_bytes else None
