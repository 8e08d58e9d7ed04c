"""Names of a checkpoint's safetensors files."""

from __future__ import annotations

from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("adapter_model", "consolidated")  # names of an adapter's weights and of copies in Mistral's own format


def is_weight_file(name: str) -> bool:
    """Whether an index may name it: a safetensors file of the index's own directory."""
    return name.endswith(".safetensors") and Path(name).name == name and "\0" not in name


def list_unlisted_files(directory: Path) -> list[Path]:
    """The files that can be a model's where neither SINGLE nor INDEX exists."""
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(OTHER_WEIGHTS))
