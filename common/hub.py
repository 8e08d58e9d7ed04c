"""Resolve a model name to a local checkpoint directory, and read the JSON files in it.

A GGUF file becomes such a directory (`common.gguf.checkpoint`).

huggingface_hub, which reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, is imported only when the Hub is needed.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from serve_llm.common.adapter_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, is_pickled_adapter
from serve_llm.common.cache_directory import cache_directory
from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.checkpoint import make_checkpoint_directory
from serve_llm.common.gguf.file import MAGIC
from serve_llm.common.gguf.parts import list_parts
from serve_llm.common.progress import make_download_log

logger = logging.getLogger(__name__)

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration and all tokenizer formats
_WEIGHT_FILES = ("*.safetensors",)
BIN_SINGLE = "pytorch_model.bin"  # pickled, and read by `serve-llm convert` only
BIN_INDEX = "pytorch_model.bin.index.json"
# Keys that some config.json files have instead of quantization_config, and the quant_method that they imply.
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_OLD_QUANTIZATION_KEY = (
    "compression_config"  # written by compressed-tensors, with or without a quantization_config inside
)
_ADAPTER_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# GGUF files beside a model's: the part that reads images or audio, and what importance was measured with.
_GGUF_COMPANIONS = ("*mmproj*", "*imatrix*")
# Copies of the same weights in the publisher's own format: subfolders, and Mistral's consolidated files.
_COPIES = ("*/*", "consolidated*.safetensors")


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    cached_only: bool = False,
) -> Path:
    """The checkpoint directory: the bundled one for "demo", a local directory, or the snapshot of a Hugging Face id,
    downloaded unless it is cached. weights=False (dummy weights): safetensors are not needed. cached_only: download
    nothing.

    A GGUF file may be named by its path, by that of a directory in which it is alone, or as "organisation/name:Q4_K_M"
    or "organisation/name:file.gguf". Raises ModelError, which says what is missing and what to do.
    """
    if (gguf := _find_gguf(model, revision, download_dir, cached_only)) is not None:
        return make_checkpoint_directory(gguf, cache_directory() / "gguf")
    if (local := _local(model)) is not None:
        directory = local
    else:
        patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else ())
        directory = _download(model, revision, download_dir, patterns, cached_only=cached_only)
        _download_modules(model, revision, download_dir, directory, cached_only)
    if not (directory / "config.json").is_file():
        raise ModelError(f"{model}: no config.json in {directory}; it must be a Hugging Face checkpoint directory")
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{model}: no *.safetensors in {directory}; convert the weights (`serve-llm convert {model} -o DIR` "
            "writes them from pytorch_model*.bin, transformers' save_pretrained from other files)"
        )
    return directory


def resolve_bin_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The directory of a checkpoint with pytorch_model*.bin, or of an adapter with adapter_model.bin, downloaded unless
    it is cached. Raises ModelError like `resolve_model`."""
    patterns = (*_TEXT_FILES, "pytorch_model*.bin", ADAPTER_PICKLE)
    directory = _local(model) or _download(model, revision, download_dir, patterns)
    if is_pickled_adapter(directory):
        return directory
    if not (directory / "config.json").is_file():
        raise ModelError(f"{model}: no config.json in {directory}; it must be a Hugging Face checkpoint directory")
    if not any((directory / name).is_file() for name in (BIN_SINGLE, BIN_INDEX)):
        raise ModelError(f"{model}: neither {BIN_SINGLE} nor {BIN_INDEX} in {directory}: nothing to convert")
    return directory


def _find_gguf(model: str, revision: str | None, download_dir: str | None, cached_only: bool) -> Path | None:
    """Return the GGUF file that the name refers to; None if it refers to another kind of checkpoint."""
    path = _expand(model)
    if _is_gguf_file(path) and ":" not in model:
        if not path.is_file():
            raise ModelError(f"there is no file {path}: check the path; organisation/name:FILE.gguf is one on the Hub")
        return path
    if path.is_dir():
        found = _leave_out_companions(sorted(file for file in path.glob("*.gguf") if file.is_file()))
        if not found or any(path.glob("*.safetensors")):
            return None
        where = path
        wanted = "*.gguf"
    else:
        repository, colon, kind = model.partition(":")
        if not colon or repository.count("/") != 1 or path.is_absolute():
            return None
        wanted = kind if kind.endswith(".gguf") else f"*{kind}.gguf"
        patterns = tuple(dict.fromkeys((wanted, f"*{kind.lower()}.gguf", f"*{kind.upper()}.gguf")))
        parts = tuple(pattern.replace(".gguf", "-*-of-*.gguf") for pattern in patterns)
        # Some publishers call files of models Q4_K_M-imatrix.
        is_exact = kind.endswith(".gguf") or _is_companion(kind)
        ignored = () if is_exact else _GGUF_COMPANIONS
        where = _download(repository, revision, download_dir, patterns + parts, ignored, cached_only=cached_only)
        lower = {pattern.lower() for pattern in patterns + parts}
        found = sorted(
            file for file in where.rglob("*.gguf") if any(fnmatch(file.name.lower(), pattern) for pattern in lower)
        )
        found = found if is_exact else _leave_out_companions(found)
    if len(found) == 1 or (found and found == list_parts(found[0])):
        return found[0]
    names = ", ".join(file.name for file in found) or "none"
    raise ModelError(f"{model}: one file {wanted} is needed in {where}, found: {names}; name one")


def _expand(name: str) -> Path:
    """Return the path with ~ replaced. Unlike Path.expanduser, leaves that of an unknown user."""
    return Path(os.path.expanduser(name))


def _is_gguf_file(path: Path) -> bool:
    """Whether the path is that of a GGUF file, which need not exist. Ollama's have no suffix."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():  # opening a named pipe would wait for its writer
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # it cannot be read
        return False


def _leave_out_companions(found: list[Path]) -> list[Path]:
    """Leave out files that hold no model of their own, unless there are no others."""
    return [file for file in found if not _is_companion(file.name)] or found


def _is_companion(name: str) -> bool:
    return any(fnmatch(name.lower(), companion) for companion in _GGUF_COMPANIONS)


def _download_modules(
    model: str, revision: str | None, download_dir: str | None, directory: Path, cached_only: bool
) -> None:
    """Download the folders named in sentence-transformers' modules.json, if there is one. They are small."""
    path = directory / "modules.json"
    if not path.is_file():
        return
    try:
        folders = [module["path"] for module in json.loads(path.read_text(encoding="utf-8")) if module["path"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if folders:
        patterns = tuple(f"{folder}/*" for folder in folders)
        _download(model, revision, download_dir, patterns, ignored=(), cached_only=cached_only)


def resolve_config(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The checkpoint directory with the files that `read_config` needs. Downloads nothing else, except a GGUF file.
    Raises ModelError like `resolve_model`."""
    if ":" in model or _is_gguf_file(_expand(model)) or _local(model) is not None:
        return resolve_model(model, revision, download_dir, weights=False)
    return _download(model, revision, download_dir, ("config.json", *_QUANTIZATION_FILES))


def resolve_tokenizer(tokenizer: str, download_dir: str | None = None) -> Path:
    """The directory of the tokenizer named by --tokenizer: local, "demo", or a Hugging Face id.
    Raises ModelError like `resolve_model`."""
    try:
        return _local(tokenizer) or _download(tokenizer, None, download_dir, _TEXT_FILES)
    except ModelError as error:
        raise ModelError(f"--tokenizer: {error}") from None


def resolve_draft_checkpoint(
    model: str, revision: str | None = None, download_dir: str | None = None, *, weights: bool = True
) -> Path:
    """The checkpoint directory of a draft model. Raises ModelError like `resolve_model`."""
    try:
        return resolve_model(model, revision, download_dir, weights=weights)
    except ModelError as error:
        raise ModelError(f"the draft model: {error}") from None


def resolve_adapter(adapter: str, download_dir: str | None = None) -> Path:
    """The directory of a LoRA adapter: a local one, or the snapshot of a Hugging Face id ("organisation/name"),
    downloaded unless it is cached. Names that cannot be such an id are not looked up. Raises ModelError."""
    directory = Path(adapter).absolute()
    if directory.exists() or _ADAPTER_ID.fullmatch(adapter) is None:
        return directory
    return _download(adapter, None, download_dir, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), what="an adapter")


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file of the checkpoint. Raises ModelError if the file is unreadable or not an
    object."""
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
    """Read the checkpoint's config.json, including a quantization_config that some writers store in a separate file,
    under another key or inside text_config. Raises ModelError."""
    config = read_json(Path(directory) / "config.json")
    older = config.get(_OLD_QUANTIZATION_KEY)
    if isinstance(older, dict) and older and "quantization_config" not in config:
        del config[_OLD_QUANTIZATION_KEY]
        numbers = older.pop("quantization_config", None)
        older |= numbers if isinstance(numbers, dict) else {}
        config["quantization_config"] = {"quant_method": "compressed-tensors", **older}
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config") and not config.get("quantization_config"):
        config["quantization_config"] = text["quantization_config"]
    for name, method in _QUANTIZATION_FILES.items():
        if not config.get("quantization_config") and (path := Path(directory) / name).is_file():
            config["quantization_config"] = {"quant_method": method, **read_json(path)}
    stored = config.get("quantization_config")
    if isinstance(stored, dict) and isinstance(stored.get("quant_method"), str):
        stored["quant_method"] = stored["quant_method"].lower().replace("compressed_tensors", "compressed-tensors")
    return config


def _local(name: str) -> Path | None:
    """Return the bundled directory for "demo", or the local directory; None if the name can only be a Hugging Face id.
    Raises ModelError."""
    if name == "demo":
        return Path(str(files("serve_llm.demo")))
    path = _expand(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{name} is a file; give the checkpoint directory that holds config.json")
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1 or name.endswith("/"):
        raise ModelError(f"there is no directory {path}: check the path, or give a Hugging Face id (organisation/name)")
    return None


def _download(
    name: str,
    revision: str | None,
    download_dir: str | None,
    patterns: tuple[str, ...],
    ignored: tuple[str, ...] = _COPIES,
    what: str = "a model",
    cached_only: bool = False,
) -> Path:
    import huggingface_hub as hub  # takes half a second to import
    from huggingface_hub import errors

    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if is_offline:
        logger.info("Looking for %s in the cache only, because HF_HUB_OFFLINE is set", name)
    elif not cached_only:
        logger.info("Looking for %s on the Hub; missing files are downloaded", name)
    at_revision = f" at revision {revision}" if revision else ""
    try:
        directory = hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=cached_only,
            tqdm_class=None if sys.stderr.isatty() else make_download_log(f"Downloading {name}"),
        )
    except errors.GatedRepoError:
        problem = f"access is granted on request: ask at https://huggingface.co/{name}, then set HF_TOKEN"
        if os.environ.get("HF_TOKEN"):
            problem = f"access is granted on request: ask at https://huggingface.co/{name} with the account of HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"the Hub has the model but not revision {revision}"
    except errors.RepositoryNotFoundError:
        problem = f"neither a local directory nor {what} on the Hub; check the name, or set HF_TOKEN if it is private"
        problem += _suggest_name(name)
    except errors.HFValidationError:
        problem = "neither a local directory nor a possible Hugging Face id (organisation/name)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        problem = f"no local directory, and{at_revision} not (completely) in the cache"
        if not cached_only:
            reason = "HF_HUB_OFFLINE is set; unset it" if is_offline else "the Hub cannot be reached; check the network"
            problem += f", while {reason}"
        problem += _suggest_name(name)
    except PermissionError as error:
        problem = f"no permission for {error.filename}; set HF_HOME or --download-dir to a directory that you may write"
    except Exception as error:  # network, disk, permissions, ...
        raise ModelError(f"{name}: download failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    else:
        return Path(str(directory))
    raise ModelError(f"{name}: {problem}")


def _suggest_name(name: str) -> str:
    """Return a hint for a name without an organisation, which is rarely one of the Hub."""
    if "/" in name:
        return ""
    is_like_demo = difflib.SequenceMatcher(None, name.lower(), "demo").ratio() > 0.7
    return "; did you mean demo, the bundled model?" if is_like_demo else "; most ids are ORGANISATION/NAME"
