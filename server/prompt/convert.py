"""Gives a checkpoint without tokenizer.json one, once, kept in a cache directory.

transformers' AutoTokenizer can read every kind (vocab.json with merges.txt, sentencepiece, ...), but importing it costs
seconds and torch, so it happens in a process of its own: this module run with -m. Nothing here imports it otherwise.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serve_llm.engine.errors import ModelError

_SOURCES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)


def converted(directory: Path) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json made from what `directory` has. Raises ModelError."""
    sources = [directory / name for name in _SOURCES if (directory / name).is_file()]
    if not any(path.suffix in (".txt", ".model") or path.name == "vocab.json" for path in sources):
        raise ModelError(
            f"{directory} has no tokenizer: neither tokenizer.json nor vocab.json, *.model or vocab.txt; name one by "
            "--tokenizer"
        )
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    target = _cache_directory() / digest.hexdigest()[:32]
    if not (target / "tokenizer.json").is_file():
        _convert(directory, target)
    return target


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "serve-llm" / "tokenizers"


def _convert(directory: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        # -P: the caller's directory must not shadow what the child imports.
        command = [sys.executable, "-P", "-m", __name__, str(directory.resolve()), work]
        # Nobody may be asked whether to run the checkpoint's own code, and nothing more is downloaded.
        environ = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ)
        if done.returncode != 0 or not (Path(work) / "tokenizer.json").is_file():
            last = (done.stderr.strip().splitlines() or ["no tokenizer.json came out"])[-1]
            raise ModelError(f"{directory}: the tokenizer cannot be converted: {last}")
        try:
            os.rename(work, target)
        except OSError:
            if not (target / "tokenizer.json").is_file():  # else another process was first, with the same result
                raise
        else:
            os.mkdir(work)  # for TemporaryDirectory to remove


def main(source: str, target: str) -> None:
    """Runs in the child process only."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False).save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
