"""Fields of OpenAI's API and of other servers that this server supports under another name or not at all. Unsupported
fields are accepted with values that have no effect, and refused by name with others."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue
from pydantic.fields import FieldInfo

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.sampling_fields import OTHER_NAMES
from serve_llm.server.sampling_params import RANGES
from serve_llm.server.schema.common import Ignored, RequestBody, Strings, ranged
from serve_llm.server.schema.structured_output import StructuredOutputsFields
from serve_llm.server.structured_output.params import PARAM


def neutral(*values: JsonValue, hint: str = "") -> Any:
    """A field of any type that is accepted with these values only. hint: what to do instead."""
    description = ("Refused at other values" if values else "Refused") + (f"; {hint}." if hint else ".")
    return Field(default=None, description=description, json_schema_extra={"enum": [*values, None]})


def same(name: str) -> str:
    return f"Another name of {name}."


_REPETITION = "use repetition_detection"


CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Names that other servers have for fields of `structured_outputs`."""


def _constraint(kind: str) -> Any:
    """A field that is another name of a field of `structured_outputs`; an empty text or list means nothing."""
    return Field(default=None, description=same(f"structured_outputs.{kind}"))


def _read_no_text(value: object) -> object:
    return None if value == "" else value


class PeerFields(RequestBody):
    """Fields that completions and chat completions share."""

    max_new_tokens: int | None = ranged("max_tokens", same("max_tokens"))
    n_predict: int | None = ranged("max_tokens", same("max_tokens"))
    rep_pen: float | None = ranged("repetition_penalty", same("repetition_penalty"))
    repeat_penalty: float | None = ranged("repetition_penalty", same("repetition_penalty"))
    sampler_seed: int | None = ranged("seed", same("seed"))
    stopping_strings: str | Strings | None = Field(default=None, description=same("stop"))
    ban_eos_token: bool | None = Field(default=None, description=same("ignore_eos"))
    spaces_between_special_tokens: bool | None = Field(default=None, description="No effect: there are never any.")
    # OpenAI's
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    # vLLM's
    use_beam_search: object | None = neutral(False, hint="beam search is not implemented, use n")
    length_penalty: object | None = neutral(1, hint="it belongs to beam search")
    early_stopping: object | None = neutral(False, hint="it belongs to beam search")
    logits_processors: object | None = neutral([])
    kv_transfer_params: object | None = neutral({})
    ec_transfer_params: object | None = neutral({})
    vllm_xargs: object | None = neutral({})
    mm_processor_kwargs: object | None = neutral({})
    media_io_kwargs: object | None = neutral({})
    data_parallel_rank: object | None = neutral()
    id_slot: object | None = neutral(-1)
    stream_interval: object | None = neutral(1)
    prompt_embeds: object | None = neutral()
    packed_top_logprobs: object | None = neutral(False)
    return_prompt_text: object | None = neutral(False)
    return_token_offsets: object | None = neutral(False, hint="logprobs of completions have text_offset")
    weight_versions: object | None = neutral([])
    max_repetition_pattern_size: object | None = neutral(0, hint=_REPETITION)
    min_repetition_pattern_size: object | None = neutral(0, hint=_REPETITION)
    repetition_min_count: object | None = neutral(0, hint=_REPETITION)
    session_id: Ignored = None
    guided_json: dict[str, object] | bool | str | None = _constraint("json")
    guided_regex: str | None = _constraint("regex")
    guided_choice: Annotated[Strings | None, BeforeValidator(_read_no_text)] = _constraint("choice")
    guided_grammar: str | None = _constraint("grammar")
    guided_whitespace_pattern: str | None = Field(
        default=None, description="With guided_json, another name of structured_outputs.whitespace_pattern."
    )
    guided_decoding_backend: Ignored = None
    # SGLang's
    regex: str | None = _constraint("regex")
    ebnf: str | None = _constraint("grammar")
    stop_regex: object | None = neutral("", [], hint="use stop")
    custom_params: object | None = neutral({})
    no_stop_trim: object | None = neutral(False, hint="use include_stop_str_in_output")
    # llama.cpp's
    grammar: str | None = _constraint("grammar")
    json_schema: dict[str, object] | bool | str | None = _constraint("json")
    cache_prompt: Ignored = None
    timings_per_token: object | None = neutral(False)
    return_progress: object | None = neutral(False)
    # samplers of text-generation-webui, Aphrodite, TabbyAPI, KoboldCpp and llama.cpp, whose parameters have no effect
    # where the sampler is off
    typical: object | None = neutral(1)
    typical_p: object | None = neutral(1)
    tfs: object | None = neutral(1)
    top_a: object | None = neutral(0)
    mirostat: object | None = neutral(0)
    mirostat_mode: object | None = neutral(0)
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    xtc_probability: object | None = neutral(0)
    xtc_threshold: Ignored = None
    dry_multiplier: object | None = neutral(0)
    dry_base: Ignored = None
    dry_allowed_length: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    smoothing_factor: object | None = neutral(0)
    smoothing_curve: Ignored = None
    guidance_scale: object | None = neutral(1)
    max_tokens_second: object | None = neutral(0)
    add_bos_token: object | None = neutral(True, hint="use add_special_tokens")
    custom_token_bans: object | None = neutral("", [], hint="use logit_bias")
    banned_strings: object | None = neutral("", [], hint="use bad_words")
    # the client's assumptions about the server
    truncation_length: Ignored = None
    num_ctx: Ignored = None
    api_type: Ignored = None
    api_server: Ignored = None

    def check_peer_fields(self) -> None:
        """Refuse unsupported fields, and give values to the fields that have other names. Raises InvalidRequest,
        Unsupported."""
        for name in self.model_fields_set:
            check_neutral(name, getattr(self, name), type(self).model_fields[name])
        for other, name in OTHER_NAMES.items():
            value = getattr(self, other)
            if value is None:
                continue
            if name in RANGES and value not in RANGES[name]:
                raise InvalidRequest(f"{other} must be {RANGES[name]}, not {value}", other)
            if getattr(self, name) not in (None, value):
                raise InvalidRequest(f"{other} is another name of {name}, but their values differ", other)
            setattr(self, name, value)
        self._read_constraint()

    def _read_constraint(self) -> None:
        """Give `structured_outputs` the value of the field that constrains the text under another name. Raises
        InvalidRequest."""
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, "", [])]
        if self.json_schema == {}:  # it means no schema
            given.remove("json_schema")
        whitespace = self.guided_whitespace_pattern or None
        if not given:
            if whitespace is not None:
                raise InvalidRequest("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
            return
        name = given[0]
        others = given[1:] if getattr(self, PARAM) is None else [PARAM]
        if others:
            raise InvalidRequest(f"{name} and {others[0]} exclude each other", name)
        fields = StructuredOutputsFields.from_other_name(name, CONSTRAINTS[name], getattr(self, name), whitespace)
        setattr(self, PARAM, fields)


def check_neutral(name: str, value: object, field: FieldInfo) -> None:
    """Raise Unsupported if the field is `neutral` and has another value."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "enum" not in extra:
        return
    if not any(_is_same(value, allowed) for allowed in extra["enum"]):  # type: ignore[union-attr]
        _, _, hint = (field.description or "").removesuffix(".").partition("; ")
        raise Unsupported(f"{name} is not supported" + (f"; {hint}" if hint else ""), name)


def _is_same(value: object, other: object) -> bool:
    """Compare like ==, except that true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
