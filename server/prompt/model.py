"""The text side of the served model: names, tokenizer, chat template and sampling defaults, read once at start-up."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import read_json, resolve_tokenizer
from serve_llm.common.options.parsers import SAMPLING_DEFAULTS
from serve_llm.common.options.schema import Options
from serve_llm.common.types import Adapter
from serve_llm.server.dialects.choose import choose_dialect
from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.fingerprint import find_header
from serve_llm.server.dialects.selfcheck import describe_dialect
from serve_llm.server.dialects.turn import opens_reasoning
from serve_llm.server.http.errors import InvalidRequest, ModelNotFound
from serve_llm.server.prompt.fill_in_middle import FillInMiddle, find_fill_in_middle
from serve_llm.server.prompt.template import ChatTemplate, load_template
from serve_llm.server.prompt.tokenizer import Tokenizer, load_tokenizer
from serve_llm.server.prompt.vector_settings import VectorSettings, read_vector_settings
from serve_llm.server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ServedModel:
    names: tuple[str, ...]  # accepted in requests; replies use the first if a request names none
    root: str  # the model as the user named it
    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]  # end a text
    defaults: dict[str, float]  # fields of SamplingParams, from generation_config.json and the options
    suppressed_ids: tuple[int, ...]  # never generated
    vectors: VectorSettings
    dialect: Dialect | None = None  # how the model writes reasoning and tool calls; None: all text is content
    dialect_source: str = ""  # where it comes from, for the log
    fill_in_middle: FillInMiddle | None = None  # None if the model has no tokens for it
    tokenizer_class: str | None = None  # as tokenizer_config.json names it
    turn_header: str = ""  # written by the template before a turn of the model
    template_variables: Mapping[str, object] = field(default_factory=dict)  # for the chat template; requests win
    ignored_defaults: tuple[str, ...] = ()  # problems with values of generation_config.json
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by name; changes while the server runs

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the text that follows `prompt` begins inside the model's reasoning."""
        return self.dialect is not None and opens_reasoning(self.dialect, prompt, self.turn_header)

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The ids that end a turn: `eos_ids` and those of the dialect."""
        ends = () if self.dialect is None else self.dialect.ends
        added = self.tokenizer.added_tokens
        end_ids = [added[end] for end in ends if end in added]
        return tuple(dict.fromkeys([*self.eos_ids, *end_ids]))

    @property
    def spelled_ends(self) -> tuple[str, ...]:
        """The dialect's ends of a turn that are plain text, not tokens."""
        ends = () if self.dialect is None else self.dialect.ends
        return tuple(end for end in ends if end not in self.tokenizer.added_tokens)

    def log_findings(self) -> None:
        """Log the dialect with the result of its self-check, and the ignored defaults. Only for the serving process,
        because others load the model too."""
        logger.info(describe_dialect(self.dialect, self.dialect_source, self.template))
        for reason in self.ignored_defaults:
            logger.warning("%s: %s; it is ignored", self.directory / _GENERATION_CONFIG, reason)

    def check_name(self, name: str | None) -> str:
        """Return the model name for the response, which may be an adapter's. name: None for the served model.
        Raises ModelNotFound."""
        if name is None:
            return self.names[0]
        if name not in self.names and name not in self.adapters:
            served = ", ".join((*self.names, *self.adapters))
            raise ModelNotFound(f"the model {name!r} does not exist; this server serves {served}", "model")
        return name

    def find_adapter(self, name: str) -> Adapter | None:
        """Return the adapter with this name; None for the base model. Raises ModelNotFound."""
        return None if name in self.names else self.adapters[self.check_name(name)]

    @classmethod
    def load(cls, directory: Path, options: Options) -> ServedModel:
        """Read the checkpoint's text files in `directory`. Raises ModelError, OptionError."""
        text_directory = directory
        if options.tokenizer is not None:
            text_directory = resolve_tokenizer(options.tokenizer, options.download_dir)
        tokenizer = load_tokenizer(text_directory)
        config = _optional_json(directory / "config.json")
        _check_vocabulary(tokenizer, config.get("vocab_size"), text_directory)
        tokenizer_class = _optional_json(text_directory / "tokenizer_config.json").get("tokenizer_class")
        generation = _optional_json(directory / _GENERATION_CONFIG)
        sampling = generation if options.generation_config == "auto" else {}
        defaults, ignored = _read_defaults(sampling)
        template = load_template(options.chat_template, text_directory, tokenizer.named_tokens)
        chosen = choose_dialect(options.dialect, text_directory, template, tokenizer.added_tokens)
        return cls(
            names=options.served_model_name or (options.model,),
            root=options.model,
            directory=directory,
            tokenizer=tokenizer,
            template=template,
            eos_ids=_eos_ids(generation, config, tokenizer),
            defaults=defaults | _read_overrides(options.override_generation_config),
            suppressed_ids=_read_suppressed_ids(sampling),
            ignored_defaults=ignored,
            vectors=read_vector_settings(directory, text_directory, config, options.classifier_from_token),
            dialect=chosen.dialect,
            dialect_source=chosen.source,
            fill_in_middle=find_fill_in_middle(tokenizer),
            tokenizer_class=tokenizer_class if isinstance(tokenizer_class, str) else None,
            template_variables=json.loads(options.default_chat_template_kwargs or "{}"),
            turn_header="" if template is None or chosen.dialect is None else find_header(template),
        )


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: object, directory: Path) -> None:
    """Raise ModelError if the tokenizer has ids outside the model's vocabulary. Added tokens are exempt."""
    highest = max(tokenizer.rust.get_vocab(with_added_tokens=False).values(), default=0)
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise ModelError(
            f"the tokenizer in {directory} has ids up to {highest}, but the model only {vocab_size}: it belongs to "
            "another model"
        )


def _eos_ids(generation: dict[str, object], config: dict[str, object], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Read the end ids from generation_config.json, else config.json, else its text_config, else the tokenizer. Ids
    below 0 and empty lists count as absent."""
    text = config.get("text_config")
    text_eos = text.get("eos_token_id") if isinstance(text, dict) else None
    for eos in (generation.get("eos_token_id"), config.get("eos_token_id"), text_eos, tokenizer.eos_id):
        ids = eos if isinstance(eos, list) else [eos]
        if valid := tuple(token_id for token_id in ids if type(token_id) is int and token_id >= 0):
            return valid
    return ()


def _read_suppressed_ids(generation: dict[str, object]) -> tuple[int, ...]:
    ids = generation.get("suppress_tokens") or []
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise ModelError(
            f"{_GENERATION_CONFIG}: suppress_tokens must be a list of token ids, not {ids!r}; correct it, or use "
            "--generation-config none"
        )
    return tuple(token_id for token_id in ids if token_id >= 0)  # -1 means none


def _read_overrides(text: str | None) -> dict[str, float]:
    """text: of the option, with numbers by name. Raises OptionError."""
    overrides, refused = _read_defaults(json.loads(text or "{}"))
    if refused:
        raise OptionError(f"--override-generation-config: {refused[0]}")
    return overrides


def _read_defaults(generation: dict[str, object]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return defaults for fields that requests omit, and messages about invalid ones, which are ignored. Raises
    ModelError."""
    defaults: dict[str, float] = {}
    ignored = []
    for name in SAMPLING_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(
                f"{_GENERATION_CONFIG}: {name} must be a number, not {value!r}; correct it, or use "
                "--generation-config none"
            )
        try:
            defaults[name] = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        except InvalidRequest as error:
            ignored.append(error.message)
    return defaults, tuple(ignored)
