"""Convert the tokenizer of a checkpoint that lacks tokenizer.json, once, into a cache directory.

transformers' AutoTokenizer reads every format (vocab.json with merges.txt, sentencepiece, ...), but importing it takes
seconds and loads torch, so a child process does it: this module run with -m.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from serve_llm.common.cache_directory import cache_directory
from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.checkpoint import TOKENIZER_ERROR

_TEKKEN = "tekken.json"  # Mistral's own format
_SOURCES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    _TEKKEN,
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)


def find_tokenizer(directory: Path) -> Path:
    """Return the directory of the checkpoint's tokenizer.json, which is created first if missing. Raises ModelError."""
    return directory if (directory / "tokenizer.json").is_file() else convert_tokenizer(directory)


def convert_tokenizer(directory: Path) -> Path:
    """The cache directory with tokenizer.json and tokenizer_config.json made from `directory`. Raises ModelError."""
    if (directory / TOKENIZER_ERROR).is_file():
        raise ModelError((directory / TOKENIZER_ERROR).read_text(encoding="utf-8"))
    sources = [directory / name for name in _SOURCES if (directory / name).is_file()]
    if not any(path.suffix in (".txt", ".model") or path.name in ("vocab.json", _TEKKEN) for path in sources):
        raise ModelError(
            f"{directory} has no tokenizer: neither tokenizer.json nor vocab.json, *.model, vocab.txt or {_TEKKEN}; "
            "choose one with --tokenizer"
        )
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    target = cache_directory() / "tokenizers" / digest.hexdigest()[:32]
    if not (target / "tokenizer.json").is_file():
        _convert(directory, target)
    return target


def _convert(directory: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        # -P: the caller's directory must not shadow what the child imports.
        command = [sys.executable, "-P", "-m", __name__, str(directory.resolve()), work]
        # No stdin, so that transformers cannot ask whether to run the checkpoint's own code; and no downloads.
        environ = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ)
        if done.returncode != 0 or not (Path(work) / "tokenizer.json").is_file():
            last = (done.stderr.strip().splitlines() or ["no tokenizer.json was written"])[-1]
            raise ModelError(f"{directory}: the tokenizer cannot be converted: {last}")
        try:
            os.rename(work, target)
        except OSError:
            if not (target / "tokenizer.json").is_file():  # else another process converted it at the same time
                raise
        else:
            os.mkdir(work)  # for TemporaryDirectory to remove


def load_transformers_tokenizer(directory: Path) -> Any:
    """transformers' object for a tokenizer; the first call imports transformers, which takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, use_fast=True, trust_remote_code=False)


def main(source: str, target: str) -> None:
    """Run in the child process."""
    tokenizer = load_transformers_tokenizer(Path(source))
    others = (Path(source) / name for name in ("vocab.json", "tokenizer.model"))
    if (Path(source) / _TEKKEN).is_file() and not any(path.is_file() for path in others):
        _complete_tekken(tokenizer)
    tokenizer.save_pretrained(target)


def _complete_tekken(tokenizer: Any) -> None:
    """Make a tekken tokenizer put <s> before each text, as Mistral's tokenizer.json files do, and name its special
    tokens; transformers' conversion does neither."""
    from tokenizers.processors import TemplateProcessing

    rust = tokenizer.backend_tokenizer
    vocabulary = tokenizer.get_vocab()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer.add_special_tokens({kind: token for kind, token in names.items() if token in vocabulary})
    if "<s>" in vocabulary and rust.num_special_tokens_to_add(False) == 0:
        rust.post_processor = TemplateProcessing(
            single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
