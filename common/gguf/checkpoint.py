"""A GGUF file as a checkpoint directory: config.json and tokenizer files made from it, and a link to the file, or to
each file of a split model.

The rest of the program reads the directory like any other. It is made once, in a cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.config import build_config, read_pooling, read_sampling
from serve_llm.common.gguf.file import GGUFFile
from serve_llm.common.gguf.parts import list_parts, name_part, read_parts

LINK = "model.gguf"  # link to the only file, or to the first
TOKENIZER_ERROR = "tokenizer_error.txt"  # why there is no tokenizer.json; raised if no other tokenizer is given


def make_checkpoint_directory(path: Path, cache: Path) -> Path:
    """The directory under `cache` for the file, which may be one part of a model. Raises ModelError."""
    paths = [part.resolve() for part in list_parts(path)]
    sources = sorted(Path(__file__).parent.glob("*.py"))  # another version may translate the same file differently
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    for part in paths:
        status = part.stat()
        digest.update(f"{part} {status.st_size} {status.st_mtime_ns} {status.st_ino}".encode())
    target = cache / digest.hexdigest()[:32]
    if target.is_dir():
        return target
    texts = _translate(read_parts(paths))
    try:
        _write_directory(target, texts, paths)
    except OSError as error:
        raise ModelError(f"cannot write {target}, the translation of {path}: {error}") from None
    return target


def list_links(directory: Path) -> list[Path]:
    """The links in a directory to the files of a model, in order; empty if it is another kind of checkpoint."""
    link = directory / LINK
    return [link, *sorted(directory.glob("model-*-of-*.gguf"))] if link.is_file() else []


def _translate(file: GGUFFile) -> dict[str, str]:
    """File name -> content."""
    # imported late: it takes time, and only a new file needs it
    from serve_llm.common.gguf.tokenizer import Vocabulary, build_tokenizer, build_tokenizer_config, find_eos_ids

    config = build_config(file)
    contents = _describe_pooling(read_pooling(file))
    if sampling := read_sampling(file):
        contents["generation_config.json"] = json.dumps(sampling)
    try:
        vocabulary = Vocabulary(file)
        config["eos_token_id"] = find_eos_ids(vocabulary)
        contents["tokenizer_config.json"] = json.dumps(build_tokenizer_config(vocabulary))
        contents["tokenizer.json"] = build_tokenizer(vocabulary)
    except ModelError as error:
        contents[TOKENIZER_ERROR] = str(error)
    return contents | {"config.json": json.dumps(config)}


def _describe_pooling(pooling: str | None) -> dict[str, str]:
    """Files of sentence-transformers that say how embeddings are made. Vectors have length 1, as from llama.cpp."""
    if pooling is None:
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    return {
        "modules.json": json.dumps(modules),
        "1_Pooling/config.json": json.dumps({"pooling_mode": pooling}),
    }


def _write_directory(target: Path, texts: dict[str, str], paths: list[Path]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        for name, text in texts.items():
            (Path(work) / name).parent.mkdir(exist_ok=True)
            (Path(work) / name).write_text(text, encoding="utf-8")
        (Path(work) / LINK).symlink_to(paths[0])
        for number, path in enumerate(paths[1:], start=2):
            (Path(work) / name_part("model", number, len(paths))).symlink_to(path)
        try:
            os.rename(work, target)
        except OSError:
            if not target.is_dir():  # otherwise another process made it at the same time
                raise
        else:
            os.mkdir(work)  # for TemporaryDirectory to remove
