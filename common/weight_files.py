"""Names of a checkpoint's safetensors files."""

from __future__ import annotations

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("adapter_model", "consolidated")  # names of an adapter's weights and of copies in Mistral's own format
