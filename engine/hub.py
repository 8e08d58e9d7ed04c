"""From what the user calls a model to a local checkpoint directory, and the JSON files in it.

Torch-free; huggingface_hub is imported only when something must come from the Hub. It reads HF_TOKEN, HF_HOME and
HF_HUB_OFFLINE by itself. Knows file names, not architectures.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path

from serve_llm.engine.errors import ModelError

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration and every kind of tokenizer
_WEIGHT_FILES = ("*.safetensors",)
# Second copies of the same weights in their publishers' own formats: subfolders, and Mistral's consolidated files.
_COPIES = ("*/*", "consolidated*.safetensors")


def resolve_model(
    model: str, revision: str | None = None, download_dir: str | None = None, *, weights: bool = True
) -> Path:
    """The directory that holds the checkpoint: the bundled one for "demo", a local directory as it is, or a snapshot of
    a Hugging Face id, downloaded unless it is cached. `weights=False` (dummy weights) does without safetensors.

    Raises ModelError saying what is missing and what to do.
    """
    if model == "demo":
        directory = Path(str(files("serve_llm.demo")))
    elif (local := _local(model)) is not None:
        directory = local
    else:
        directory = _download(model, revision, download_dir, _TEXT_FILES + (_WEIGHT_FILES if weights else ()))
    if not (directory / "config.json").is_file():
        raise ModelError(f"{model}: no config.json in {directory}; it must be a Hugging Face checkpoint directory")
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{model}: no *.safetensors in {directory}; convert the weights with transformers' save_pretrained"
        )
    return directory


def find_config(model: str, revision: str | None = None, download_dir: str | None = None) -> dict[str, object]:
    """The model's config.json, of which nothing else is downloaded. Raises ModelError like `resolve_model`."""
    if model == "demo" or _local(model) is not None:
        return read_config(resolve_model(model, weights=False))
    return read_config(_download(model, revision, download_dir, ("config.json",)))


def resolve_tokenizer(tokenizer: str, download_dir: str | None = None) -> Path:
    """The directory of a tokenizer given apart from the model: local, "demo", or a Hugging Face id.
    Raises ModelError like `resolve_model`."""
    if tokenizer == "demo":
        return resolve_model(tokenizer)
    try:
        return _local(tokenizer) or _download(tokenizer, None, download_dir, _TEXT_FILES)
    except ModelError as error:
        raise ModelError(f"--tokenizer: {error}") from None


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file of the checkpoint. Raises ModelError when it cannot be read or is no object."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ModelError(f"{path} is not valid JSON ({error}); was it cut short when it was copied?") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def read_config(directory: Path | str) -> dict[str, object]:
    """The checkpoint's config.json. Raises ModelError."""
    return read_json(Path(directory) / "config.json")


def _local(name: str) -> Path | None:
    """The existing directory of that name, None when the name can only be a Hugging Face id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{name} is a file; give the checkpoint directory that holds config.json")
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1 or name.endswith("/"):
        raise ModelError(f"there is no directory {path}: check the path, or give a Hugging Face id (organisation/name)")
    return None


def _download(name: str, revision: str | None, download_dir: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub as hub  # half a second: only who needs the Hub pays for it
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        found = hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(_COPIES),
        )
    except errors.GatedRepoError:
        problem = f"access is granted on request: ask at https://huggingface.co/{name}, then set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"the Hub has the model but not revision {revision}"
    except errors.RepositoryNotFoundError:
        problem = "neither a local directory nor a model on the Hub; check the name, or set HF_TOKEN if it is private"
    except errors.HFValidationError:
        problem = "neither a local directory nor a possible Hugging Face id (organisation/name)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        reason = "HF_HUB_OFFLINE is set; unset it" if offline else "the Hub cannot be reached; check the network"
        problem = f"no local directory, and{at} not (completely) in the cache, while {reason}"
    except Exception as error:  # whatever else a download can meet: network, disk, permissions
        raise ModelError(f"{name}: download failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    else:
        return Path(str(found))
    raise ModelError(f"{name}: {problem}")
