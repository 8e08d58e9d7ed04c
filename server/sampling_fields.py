"""Keywords of `SamplingParams` that are not fields here: vLLM's are accepted with neutral values, others refused by
name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from serve_llm.server.http.errors import InvalidRequest

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "rep_pen": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
    "ban_eos_token": "ignore_eos",
}
"""Names that other servers have for fields of `SamplingParams`."""


class NeutralField(NamedTuple):
    """A field of vLLM's SamplingParams that is accepted with values that have no effect."""

    is_neutral: Callable[[Any], bool]
    hint: str


def _is_empty(value: object) -> bool:
    return not value


def _is_whole_output(value: object) -> bool:
    """Return whether this is vLLM's RequestOutputKind, by name or number, except DELTA: `LLM` returns whole texts."""
    return getattr(value, "name", value) in (None, "CUMULATIVE", "FINAL_ONLY", 0, 2)


NEUTRAL = {
    "best_of": NeutralField(lambda value: value in (None, 1), "n gives several texts"),
    "detokenize": NeutralField(lambda value: value is True, "omit it; text costs the engine nothing"),
    "early_stopping": NeutralField(_is_empty, "it belongs to beam search"),
    "extra_args": NeutralField(_is_empty, "omit it"),
    "flat_logprobs": NeutralField(_is_empty, "omit it"),
    "guided_decoding": NeutralField(_is_empty, "structured_outputs=StructuredOutputs(json=...)"),
    "length_penalty": NeutralField(lambda value: value == 1, "it belongs to beam search"),
    "logits_processors": NeutralField(_is_empty, "logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    "output_kind": NeutralField(_is_whole_output, "the server streams; LLM returns whole texts"),
    "skip_clone": NeutralField(_is_empty, "omit it"),
    "skip_reading_prefix_cache": NeutralField(_is_empty, "LLM(..., enable_prefix_caching=False)"),
    "spaces_between_special_tokens": NeutralField(lambda value: isinstance(value, bool), "omit it"),
    "use_beam_search": NeutralField(_is_empty, "beam search is not implemented; n gives several texts"),
}


class SamplingFields(msgspec.StructMeta):
    """The metaclass of `SamplingParams`, which reads its keywords."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Raises TypeError for an unknown keyword, and InvalidRequest for one whose value is not neutral."""
        if args:
            raise TypeError(f"{cls.__name__} takes keywords only, such as temperature=0.5")
        try:
            return super().__call__(**fields)
        except TypeError:
            known = [name for name in fields if name in cls.__struct_fields__]
            if len(known) == len(fields):
                raise
        for name in fields.keys() - set(known):
            cls._check_neutral(name, fields)
        return super().__call__(**{name: fields[name] for name in known})

    def _check_neutral(cls, name: str, fields: Mapping[str, object]) -> None:
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise TypeError(f"{cls.__name__} has no field {name!r}{_suggest(name, cls.__struct_fields__)}")
        value = fields[name]
        is_old_default = name == "best_of" and value == fields.get("n", 1)
        if not (is_old_default or neutral.is_neutral(value)):
            raise InvalidRequest(f"{name}={value!r} is not supported; {neutral.hint}", name)


def _suggest(name: str, known: tuple[str, ...]) -> str:
    nearest = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    return f"; did you mean {nearest}?" if nearest else "; docs/offline.md lists what takes its place"
