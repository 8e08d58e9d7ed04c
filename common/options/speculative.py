"""The value of `--speculative-config`: a JSON object with vLLM's keys. Must stay quick to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

MAX_DRAFT_TOKENS = 16
MAX_MATCH = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, and how long they may be."""

    method: str  # "ngram": what followed an earlier occurrence of the text's latest ids
    num_speculative_tokens: int = 8  # most drafts of a sequence in a step
    prompt_lookup_max: int = 8  # ids of an occurrence that is as good as any longer one
    prompt_lookup_min: int = 3  # ids of the shortest occurrence that counts

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """text: as from `parse_speculative_config`."""
        return cls(**json.loads(text))


def parse_speculative_config(value: object) -> str:
    """The value with its defaults, as JSON: an object, or the text of one."""
    given = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    if not isinstance(given, Mapping):
        raise ValueError('expected a JSON object, such as {"method": "ngram", "num_speculative_tokens": 4}')
    names = [field.name for field in fields(SpeculativeConfig)]
    unknown = [str(key) for key in given if key not in names]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not supported; the keys are {', '.join(names)}")
    if given.get("method") != "ngram":
        raise ValueError(f"method {given.get('method')!r} is not supported; the only one is 'ngram', prompt lookup")
    given = {key: number for key, number in given.items() if number is not None}
    least = _read_count(given, "prompt_lookup_min", MAX_MATCH)
    most = _read_count(given, "prompt_lookup_max", MAX_MATCH)
    if least is None:
        least = min(SpeculativeConfig.prompt_lookup_min, most or MAX_MATCH)
    if most is None:
        most = max(SpeculativeConfig.prompt_lookup_max, least)
    if least > most:
        raise ValueError(f"prompt_lookup_min, {least}, is more than prompt_lookup_max, {most}")
    count = _read_count(given, "num_speculative_tokens", MAX_DRAFT_TOKENS)
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=count or SpeculativeConfig.num_speculative_tokens,
        prompt_lookup_max=most,
        prompt_lookup_min=least,
    )
    return json.dumps(asdict(config))


def _read_count(given: Mapping[str, object], name: str, highest: int) -> int | None:
    number = given.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= highest:
        raise ValueError(f"{name} must be a whole number from 1 to {highest}")
    return number
