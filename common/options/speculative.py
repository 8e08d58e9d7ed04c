"""The value of `--speculative-config`: a JSON object with vLLM's keys, a model or "none". Must stay quick to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from serve_llm.common.nesting import parse_option_json
from serve_llm.common.options.parsers import parse_object

MAX_DRAFT_TOKENS = 16
MAX_MATCH = 64
MAX_BATCH_SIZE = 1 << 16
MAX_RANKS = 1 << 16
MTP_TOKENS = 1  # what an MTP layer is trained for


NO_DRAFTS = "none"
PROMPT_LOOKUP = "ngram"
DRAFT_MODEL = "draft_model"
EAGLE3 = "eagle3"
MTP = "mtp"
# vLLM's older names
OTHER_NAMES = {"[ngram]": PROMPT_LOOKUP} | dict.fromkeys(
    ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), MTP
)
# Method -> its keys.
KEYS = {
    PROMPT_LOOKUP: ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"),
    DRAFT_MODEL: ("num_speculative_tokens", "model", "revision", "draft_tensor_parallel_size", "disable_by_batch_size"),
    EAGLE3: ("num_speculative_tokens", "model", "revision", "draft_tensor_parallel_size", "disable_by_batch_size"),
    MTP: ("num_speculative_tokens", "model", "draft_tensor_parallel_size", "disable_by_batch_size"),
}
_OTHER_LAYERS = (
    "the MTP layers of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5 are read, with 'mtp'; those of other models are not"
)
# Other methods of vLLM -> why they are not supported.
OTHER_METHODS = {
    "eagle": "heads of EAGLE 1 and 2 are not read; those of EAGLE-3 are, with 'eagle3'",
    "medusa": "Medusa heads are not read; EAGLE-3 heads are, with 'eagle3'",
    "mlp_speculator": "MLP speculators are not read; EAGLE-3 heads are, with 'eagle3'",
    "suffix": "'ngram' looks for the latest ids in the prompt, the output and recent outputs",
    "mimo_mtp": _OTHER_LAYERS,
    "ernie_mtp": _OTHER_LAYERS,
    "longcat_flash_mtp": _OTHER_LAYERS,
    "ngram_gpu": "'ngram' looks prompts up on the CPU, beside the steps of the GPU",
}
OTHER_KEYS = {
    "disable_logprobs": "log-probabilities are the same with and without drafts; omit it",
    "quantization": "a draft model is quantised as --quantization says; omit it",
    "max_model_len": "a draft model has the context length of the served model; omit it",
    "acceptance_method": "a draft is accepted if it equals the sampled id; omit it",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, and their maximum length."""

    # "ngram": what followed an earlier occurrence of the text's latest ids; "draft_model": a small model; "eagle3": an
    # EAGLE-3 head, which reads hidden states of the served model; "mtp": the served checkpoint's MTP layer, likewise
    method: str
    num_speculative_tokens: int = 8  # maximum number of drafts per sequence in a step
    prompt_lookup_max: int = 16  # maximum length of a match; longer ones are not preferred
    prompt_lookup_min: int = 3  # minimum length of a match
    model: str | None = None  # the draft model or head: a directory or a Hugging Face id
    revision: str | None = None  # branch, tag or commit of the Hugging Face id
    draft_tensor_parallel_size: int = 1  # ranks of a draft model: 1, or as many as the served model has
    disable_by_batch_size: int | None = None  # more requests, running and waiting: no drafts; None: never

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model, draft head or MTP layer runs in addition to the served model."""
        return self.method != PROMPT_LOOKUP

    @property
    def reads_inner_states(self) -> bool:
        """Whether drafts are made from hidden states between layers of the served model."""
        return self.method == EAGLE3

    @property
    def reads_last_states(self) -> bool:
        """Whether drafts are made from the output of the served model's last layer."""
        return self.method == MTP

    @property
    def reads_hidden_states(self) -> bool:
        """Whether drafts are made from any hidden states of the served model."""
        return self.reads_inner_states or self.reads_last_states

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """text: the result of `parse_speculative_config`."""
        given = json.loads(text)
        if given["method"] == MTP:
            given.pop("model", None)  # the served model: see `find_mtp_model`
        return cls(**given)


def parse_speculative_config(value: object) -> str:
    """Return the value with its defaults as JSON, or NO_DRAFTS. value: an object, its JSON text, a method, a draft
    model or NO_DRAFTS."""
    if value == NO_DRAFTS:
        return NO_DRAFTS
    given = parse_object(
        _read_text(value.strip()) if isinstance(value, str) else value,
        '{"method": "ngram", "num_speculative_tokens": 4}',
    )
    method, given = _read_method(given)
    if method in OTHER_METHODS:
        raise ValueError(f"method {method!r} is not supported: {OTHER_METHODS[method]}")
    if method not in KEYS:
        raise ValueError(
            f"method {method!r} is not supported; use 'ngram' (prompt lookup), 'draft_model' (a small model), "
            "'eagle3' (an EAGLE-3 head), 'mtp' (the checkpoint's own MTP layer), or 'none' instead of an object"
        )
    unknown = [str(key) for key in given if key not in ("method", *KEYS[method])]
    if unknown and unknown[0] in OTHER_KEYS:
        raise ValueError(f"{unknown[0]!r} is not supported: {OTHER_KEYS[unknown[0]]}")
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not supported; the keys of {method} are {', '.join(KEYS[method])}")
    given = {key: number for key, number in given.items() if number is not None}
    count = _read_count(given, "num_speculative_tokens", MAX_DRAFT_TOKENS)
    count = count or (MTP_TOKENS if method == MTP else SpeculativeConfig.num_speculative_tokens)
    config = _read_prompt_lookup(given, count) if method == PROMPT_LOOKUP else _read_draft_model(given, method, count)
    config = replace(config, disable_by_batch_size=_read_count(given, "disable_by_batch_size", MAX_BATCH_SIZE))
    keys = ("method", *KEYS[method])
    return json.dumps({key: chosen for key, chosen in asdict(config).items() if key in keys and chosen is not None})


def find_mtp_model(text: str) -> str | None:
    """The model named in a configuration for an MTP layer, which must be the served model; None if there is none.
    text: the result of `parse_speculative_config`."""
    if text == NO_DRAFTS:
        return None
    given = json.loads(text)
    return given.get("model") if given["method"] == MTP else None


def _read_text(text: str) -> object:
    if text.startswith(("{", "[")) and text not in OTHER_NAMES:
        try:
            return parse_option_json(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    return {"method": text} if text in (*KEYS, *OTHER_NAMES, *OTHER_METHODS) else {"model": text}


def _read_method(given: Mapping[str, object]) -> tuple[str | None, Mapping[str, object]]:
    """Return the method and its keys. Like vLLM, accept "ngram" in place of a model name."""
    method = given.get("method")
    model = given.get("model")
    method = OTHER_NAMES.get(str(method), method)
    if model in (PROMPT_LOOKUP, "[ngram]") and method in (None, PROMPT_LOOKUP):
        return PROMPT_LOOKUP, {key: value for key, value in given.items() if key != "model"}
    if method is None and model is not None:
        return DRAFT_MODEL, given
    return None if method is None else str(method), given


def _read_prompt_lookup(given: Mapping[str, object], count: int) -> SpeculativeConfig:
    least = _read_count(given, "prompt_lookup_min", MAX_MATCH)
    most = _read_count(given, "prompt_lookup_max", MAX_MATCH)
    if least is None:
        least = min(SpeculativeConfig.prompt_lookup_min, most or MAX_MATCH)
    if most is None:
        most = max(SpeculativeConfig.prompt_lookup_max, least)
    if least > most:
        raise ValueError(f"prompt_lookup_min ({least}) is greater than prompt_lookup_max ({most})")
    return SpeculativeConfig(
        method=PROMPT_LOOKUP, num_speculative_tokens=count, prompt_lookup_max=most, prompt_lookup_min=least
    )


def _read_draft_model(given: Mapping[str, object], method: str, count: int) -> SpeculativeConfig:
    what = {DRAFT_MODEL: "draft model", EAGLE3: "head", MTP: "MTP layer"}[method]
    model = given.get("model")
    if method != MTP and (not isinstance(model, str) or not model):
        raise ValueError(f"method {method} needs 'model', the directory or Hugging Face id of the {what}")
    if method == MTP and not isinstance(model, str | None):
        raise ValueError("method mtp: model must be the name of the served model; omit it")
    size = _read_count(given, "draft_tensor_parallel_size", MAX_RANKS) or 1
    if method != DRAFT_MODEL and size != 1:
        raise ValueError(f"draft_tensor_parallel_size must be 1: the {what} runs on a single rank")
    revision = given.get("revision")
    if not isinstance(revision, str | None) or revision == "":
        raise ValueError(f"revision must be a branch, tag or commit, not {revision!r}")
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=count,
        model=None if model is None else str(model),
        revision=revision,
        draft_tensor_parallel_size=size,
    )


def _read_count(given: Mapping[str, object], name: str, highest: int) -> int | None:
    number = given.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= highest:
        raise ValueError(f"{name} must be a whole number from 1 to {highest}, not {number!r}")
    return number
