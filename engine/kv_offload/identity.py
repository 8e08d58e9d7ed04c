"""One hash of everything besides the tokens that determines the content of a KV cache block."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from serve_llm.engine.config import Config
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig
from serve_llm.kernels.cpu import library

SUFFIXES = (".safetensors", ".gguf", ".bin", ".json")  # files from which a model is read
# Settings that change no key and no value. All others belong to the identity.
IRRELEVANT = (
    "directory",
    "max_num_seqs",
    "kv_cache_memory",
    "kv_offload_memory",
    "kv_offload_dir",
    "kv_offload_dir_size",
    "gpu_memory_utilization",
    "seed",
    "tokenizer",
    "download_dir",
    "executor_backend",
    "step_timeout",
    "data_parallel_size",
    "data_parallel_rank",
    "jump_forward",
    "speculation",
    "kv_events",
    "max_cpu_loras",
    "max_loras",
    "max_lora_rank",
    "pooling",
)


def find_identity(config: Config, kv_cache_config: KVCacheConfig, memory: Sequence[HostMemory], digests: Path) -> str:
    """Hash the checkpoint's files, the settings, the block layout, the versions and the instruction set.

    memory: of the ranks. digests: a directory that caches the hashes of files, because reading all weights takes a
    while. Raises OSError.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in IRRELEVANT}
    suffixes: tuple[str, ...] = SUFFIXES
    if config.load_format == "dummy":
        settings["seed"] = config.seed
        suffixes = (".json",)
    paths = [path for path in sorted(Path(config.directory).iterdir()) if path.suffix in suffixes]
    parts = {
        "versions": [version("serve-llm"), version("torch")],
        "kernels": library.find_variant(),
        "settings": settings,
        "expert_engines": config.expert_engines,
        "groups": [asdict(group) for group in kv_cache_config.groups],
        "block_bytes": [rank.block_bytes for rank in memory],
        "files": {path.name: _find_digest(path, digests) for path in paths},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _find_digest(path: Path, digests: Path) -> str:
    """Return the SHA-256 of a file; it is recomputed only if the file has changed."""
    target = path.resolve()
    status = target.stat()
    known = f"{target} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    note = digests / hashlib.sha256(known.encode()).hexdigest()
    with contextlib.suppress(FileNotFoundError):
        return note.read_text()
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    digests.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = note.with_suffix(f".{os.getpid()}")
    unfinished.write_text(digest)
    unfinished.rename(note)
    return digest
