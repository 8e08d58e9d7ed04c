"""What the server knows of the model that it serves: names, tokenizer, chat template, defaults for sampling.

Read once at start from the checkpoint's text files; knows neither weights nor the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_llm.engine.errors import ModelError
from serve_llm.engine.hub import read_json, resolve_tokenizer
from serve_llm.engine.options import Options
from serve_llm.server.errors import ModelNotFound
from serve_llm.server.prompt.template import ChatTemplate, load_template
from serve_llm.server.prompt.tokenizer import Tokenizer, load_tokenizer

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServedModel:
    names: tuple[str, ...]  # that requests may use; the first stands in replies
    root: str  # the model as the user named it
    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: dict[str, float]  # of SamplingParams, from generation_config.json

    def check_name(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound. No name means the served model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {', '.join(self.names)}", "model")
        return name

    @classmethod
    def load(cls, directory: Path, options: Options) -> ServedModel:
        """Reads the text side of the checkpoint in `directory`. Raises ModelError, OptionError."""
        text_directory = directory
        if options.tokenizer is not None:
            text_directory = resolve_tokenizer(options.tokenizer, options.download_dir)
        tokenizer = load_tokenizer(text_directory)
        config = _optional_json(directory / "config.json")
        _check_vocabulary(tokenizer, config.get("vocab_size"), text_directory)
        generation = _optional_json(directory / "generation_config.json")
        return cls(
            names=options.served_model_name or (options.model,),
            root=options.model,
            directory=directory,
            tokenizer=tokenizer,
            template=load_template(options.chat_template, text_directory, tokenizer.named_tokens),
            eos_ids=_eos_ids(generation, config, tokenizer),
            defaults=_defaults(generation) if options.generation_config == "auto" else {},
        )


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: object, directory: Path) -> None:
    """Raises ModelError if the tokenizer writes ids that the model does not have. (Added tokens it may have more.)"""
    highest = max(tokenizer.rust.get_vocab(with_added_tokens=False).values(), default=0)
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise ModelError(
            f"the tokenizer in {directory} has ids up to {highest}, but the model only {vocab_size}: it belongs to "
            "another model"
        )


def _eos_ids(generation: dict[str, object], config: dict[str, object], tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json knows best, then config.json, then the tokenizer."""
    for found in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_id):
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            return tuple(token_id for token_id in ids if isinstance(token_id, int))
    return ()


def _defaults(generation: dict[str, object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _DEFAULTED:
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
            raise ModelError(
                f"generation_config.json: {name} must be a number, not {value!r}; correct it, or use "
                "--generation-config none"
            )
        found[name] = int(value) if name == "top_k" else value
    return found
