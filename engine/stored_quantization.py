"""Accept --quantization with the name of the checkpoint's own format, as in vLLM and SGLang. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_llm.common.errors import OptionError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.parsers import OTHER_METHODS, STORED_FORMATS

STORED_AS_FP8 = ("fp8", "fbgemm_fp8")  # values of quant_method
NOT_NEEDED = "--quantization: the checkpoint is stored as %s, which needs no option"


def accept_stored_format(options: EngineOptions, raw: Mapping[str, object]) -> EngineOptions:
    """Return the options with --quantization auto if it names the format of the checkpoint; otherwise the same object.

    raw: config.json. Raises OptionError if the checkpoint is stored in another format.
    """
    asked = options.quantization
    stored = find_stored_format(raw)
    if asked == "fp8" and stored in STORED_AS_FP8:
        return replace(options, quantization="auto")
    if asked not in STORED_FORMATS.values():
        return options
    if asked != stored:
        found = f"is stored as {stored}" if stored else "is not quantised"
        raise OptionError(f"--quantization: {asked} is a format of checkpoints, but this one {found}; omit the option")
    return replace(options, quantization="auto")


def find_stored_format(raw: Mapping[str, object]) -> str:
    """Return the checkpoint's quant_method, "" if it is not quantised. raw: config.json."""
    config = raw.get("quantization_config")
    method = str(config.get("quant_method") or "") if isinstance(config, Mapping) else ""
    return OTHER_METHODS.get(method, method)
