"""The value of `--eplb-config`: a JSON object with vLLM's keys. Must stay quick to import."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from serve_llm.common.options.parsers import parse_object

MINIMUMS = {"step_interval": 1, "num_redundant_experts": 0}
UNSUPPORTED_KEYS = {
    "window_size": "all steps since the last placement count; omit it",
    "log_balancedness": "--log-level debug logs each change of the placement; omit it",
    "use_async": "one layer is placed per step; omit it",
}


@dataclass(frozen=True, kw_only=True)
class EPLBConfig:
    """How experts are moved between the ranks of an expert-parallel group."""

    step_interval: int = 3000  # steps between two placements
    num_redundant_experts: int = 0  # slots of each layer for further copies of busy experts, over all engines

    @classmethod
    def parse(cls, text: str) -> EPLBConfig:
        """text: the result of `parse_eplb_config`."""
        return cls(**json.loads(text))


def parse_eplb_config(value: object) -> str:
    """Return the value with its defaults as JSON. value: an object or its JSON text."""
    given = parse_object(value, '{"num_redundant_experts": 8, "step_interval": 3000}')
    keys = [field.name for field in fields(EPLBConfig)]
    for key, number in given.items():
        if key in UNSUPPORTED_KEYS:
            raise ValueError(f"{key!r} is not supported: {UNSUPPORTED_KEYS[key]}")
        if key not in keys:
            raise ValueError(f"{str(key)!r} is not supported; the keys are {', '.join(keys)}")
        if isinstance(number, bool) or not isinstance(number, int) or number < MINIMUMS[key]:
            raise ValueError(f"{key} must be a whole number of at least {MINIMUMS[key]}")
    return json.dumps(asdict(EPLBConfig(**given)))
