"""Parsers of option values. Each takes text (command line, environment) or a plain value (YAML, Python keyword) and
returns the field's value, or raises ValueError saying what it expected; `sources` adds which option and where.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from serve_llm.common.nesting import check_nesting, parse_option_json

Parse = Callable[[object], object]

DEFAULT_QUEUE = (2048, 4 * 2**20)  # requests, prompt tokens

_MAX_SECONDS = 365 * 86400
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_count(value: object) -> int:
    """A count: 32768, "32768", "32k" = 32,000 or "32K" = 32,768, as in vLLM: lower-case units are powers of 1000 and
    allow decimals ("1.5k"), upper-case units are powers of 1024 and do not."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", str(value).strip())
    if isinstance(value, bool) or match is None or ("." in match[1] and not match[2].islower()):
        raise ValueError('expected a whole number, or one with a unit: "32k" is 32,000 and "32K" is 32,768')
    return _scale(match[1], _COUNT_UNITS[match[2]])


def parse_context_length(value: object) -> int:
    """Parse a count of at least 1. vLLM's words for the longest context that fits are answered."""
    if str(value).strip().lower() in ("auto", "-1"):
        raise ValueError(
            "omit it for the model's own limit; if that does not fit, the error names the length that does"
        )
    number = parse_count(value)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def parse_load_format(value: object) -> str:
    """Parse auto or dummy, or another engine's name for what auto reads anyway."""
    word = str(value).lower()
    if word in ("auto", "safetensors", "hf", "gguf", "bitsandbytes"):
        return "auto"
    if word != "dummy":
        raise ValueError("expected auto or dummy; auto reads safetensors and GGUF, and `serve-llm convert` *.bin")
    return word


def parse_bytes(value: object) -> int:
    """Bytes: 1073741824, "8GiB" and "8g" (powers of 1024), "8GB" (powers of 1000), in either case, with decimals."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, bool) or match is None or match[2] not in _BYTE_UNITS:
        raise ValueError('expected bytes, such as 8589934592, "8GiB" or "512MiB"')
    return _scale(match[1], _BYTE_UNITS[match[2]])


def _scale(number: str, unit: int) -> int:
    """Exact, unlike with floats."""
    integer, _, decimals = number.partition(".")
    divisor: int = 10 ** len(decimals)
    return int(integer + decimals) * unit // divisor


def at_least_one(parse: Callable[[object], int]) -> Parse:
    """Return a parser that accepts what `parse` accepts if it is at least 1."""

    def parse_positive(value: object) -> int:
        number = parse(value)
        if number < 1:
            raise ValueError("must be at least 1")
        return number

    return parse_positive


def int_between(low: int, high: int) -> Parse:
    """Return a parser of whole numbers from `low` to `high`, both included."""

    def parse_int(value: object) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)) or not low <= int(str(value)) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(str(value))

    return parse_int


def one_of(*allowed: str, synonyms: Mapping[str, str] | None = None) -> Parse:
    """Return a parser of the given lower-case words, in either case. synonyms: other spellings of them."""

    def parse_word(value: object) -> str:
        word = str(value).lower()
        word = (synonyms or {}).get(word, word)
        if word not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return word

    return parse_word


def parse_positive_floats(value: object) -> tuple[float, ...]:
    """Parse several numbers above 0: a list, or text with commas."""
    try:
        numbers = tuple(float(item) for item in _split(value))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError("expected numbers above 0 separated by commas, such as 3,1")
    return numbers


def parse_positive_ints(value: object) -> tuple[int, ...]:
    """Parse several whole numbers of at least 1: a list, or text with commas."""
    items = _split(value)
    if not items or not all(re.fullmatch(r"0*[1-9][0-9]*", item) for item in items):
        raise ValueError("expected whole numbers of at least 1 separated by commas, such as 9,8,7")
    return tuple(map(int, items))


def parse_whole_numbers(value: object) -> tuple[int, ...]:
    """Parse several whole numbers of at least 0: a list, or text with commas."""
    items = _split(value)
    if not items or not all(re.fullmatch(r"[0-9]+", item) for item in items):
        raise ValueError("expected whole numbers separated by commas, such as 3,1")
    return tuple(map(int, items))


def _split(value: object) -> list[str]:
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(item).strip() for item in items]


def parse_block_size(value: object) -> int:
    """Parse a power of two from 8 to 256."""
    sizes = ("8", "16", "32", "64", "128", "256")
    if isinstance(value, bool) or str(value) not in sizes:
        raise ValueError(f"expected one of {', '.join(sizes)}")
    return int(str(value))


def parse_kv_cache_dtype(value: object) -> str:
    if "e5m2" in str(value).lower():
        raise ValueError("fp8 with 5 bits of exponent is not supported; fp8 is e4m3; expected auto, int8 or fp8")
    return str(one_of("auto", "int8", "fp8", synonyms={"fp8_e4m3": "fp8"})(value))


QUANTIZATIONS = ("auto", "int8", "int4", "int4-g32", "int4-g128", "fp8")
# vLLM's and SGLang's names of checkpoint formats -> quant_method in config.json.
STORED_FORMATS = {
    "auto-round": "auto-round",
    "awq": "awq",
    "awq_marlin": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm_fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
    "torchao": "torchao",
    "w8a8_fp8": "compressed-tensors",
    "w8a8_int8": "compressed-tensors",
}
# Other spellings of quant_method in config.json: AutoRound's before 0.5, and vLLM's names.
OTHER_METHODS = {
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}


def parse_quantization(value: object) -> str:
    """Parse how to quantise while loading, or the `quant_method` that the checkpoint is said to have."""
    word = str(value).lower()
    if word in STORED_FORMATS:
        return STORED_FORMATS[word]
    if word not in QUANTIZATIONS:
        listed = ", ".join(QUANTIZATIONS)
        raise ValueError(f"expected one of {listed}; a checkpoint that is stored in few bits needs no option")
    return word


def parse_fraction(value: object) -> float:
    """Parse a number above 0 and at most 1."""
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise ValueError("expected a number above 0 and at most 1")
    return number


def parse_seconds(value: object) -> float:
    """Parse a duration above 0, at most a year."""
    number = _parse_float(value)
    if not 0.0 < number <= _MAX_SECONDS:
        raise ValueError("expected seconds, a number above 0")
    return number


def parse_duration(value: object) -> float:
    """Parse a duration that may be 0, at most a year."""
    number = _parse_float(value)
    if not 0.0 <= number <= _MAX_SECONDS:
        raise ValueError("expected seconds, a number that is at least 0")
    return number


def _parse_float(value: object) -> float:
    """Return -1 for anything that is not a number."""
    try:
        return -1.0 if isinstance(value, bool) else float(str(value))
    except ValueError:
        return -1.0


def parse_queue(value: object) -> tuple[int, int]:
    """Parse a number of requests and of prompt tokens: "1024,4M" or a list of both; the tokens may be omitted."""
    items = _split(value)
    if len(items) not in (1, 2):
        raise ValueError('expected requests, or requests and prompt tokens separated by a comma, such as "1024,4M"')
    numbers = [parse_count(item) for item in items]
    if min(numbers) < 1:
        raise ValueError("must be at least 1")
    return numbers[0], numbers[1] if len(numbers) == 2 else DEFAULT_QUEUE[1]


def parse_boolean(value: object) -> bool:
    """Parse true or false, also as 1, yes, on, 0, no, off."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError("expected true or false")
    return words[str(value).lower()]


def parse_text(value: object) -> str:
    """Parse text that is not empty: `--api-key "$UNSET"` must not open the server."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected some text (quote numbers in YAML)")
    return value


def parse_responses_store(value: object) -> str:
    """Parse `off`, `memory` or a file. Words for a switch are not files: YAML reads `off` as false."""
    text = parse_text(str(value) if isinstance(value, bool) else value)
    word = text.lower()
    if word in ("off", "none", "no", "false", "0"):
        return "off"
    if word in ("on", "yes", "true", "1"):
        raise ValueError("expected off, memory, or a file such as responses.sqlite")
    return "memory" if word == "memory" else text


def parse_texts(value: object) -> tuple[str, ...]:
    """Parse several texts: a list, or one text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        raise ValueError("expected one text or a list of them")
    return tuple(parse_text(item) for item in items)


def parse_lora_modules(value: object) -> tuple[str, ...]:
    """Parse several NAME=DIRECTORY, each name once: a list, or one text with commas. Each may also be vLLM's {"name":
    NAME, "path": DIRECTORY}, as an object in a list or as text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = [value]
    items = parse_texts([_join_module(item) for item in value] if isinstance(value, list | tuple) else value)
    names = [
        name for name, equals, directory in (item.partition("=") for item in items) if name and equals and directory
    ]
    if len(names) < len(items):
        raise ValueError("expected NAME=DIRECTORY")
    if len(set(names)) < len(names):
        raise ValueError("expected each name once")
    return items


def _join_module(item: object) -> object:
    """Turn vLLM's object, or its text, into NAME=DIRECTORY; return anything else unchanged."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = parse_option_json(item)
    if not isinstance(item, dict):
        return item
    unknown = [key for key in item if key not in ("name", "path")]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not supported, only 'name' and 'path'; the parent is the served model")
    name = item.get("name")
    path = item.get("path")
    if not isinstance(name, str) or not isinstance(path, str) or "=" in name:
        raise ValueError('expected {"name": NAME, "path": DIRECTORY}')
    return f"{name}={path}"


def parse_object(value: object, example: str) -> Mapping[str, Any]:
    """Parse a JSON object. value: an object or its JSON text. example: a valid one, for the error."""
    given = parse_option_json(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a JSON object, such as {example}")
    check_nesting(given)
    return given


RESERVED_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")
"""Variables of chat templates that only fields of requests set."""


def parse_template_kwargs(value: object) -> str:
    """Parse variables of chat templates; return them as JSON."""
    given = parse_object(value, '{"enable_thinking": false}')
    reserved = [name for name in (*RESERVED_VARIABLES, "tools", "documents") if name in given]
    if reserved:
        raise ValueError(f"{reserved[0]!r} is set by requests")
    try:
        return json.dumps(given)
    except TypeError:  # YAML has more types
        raise ValueError("expected values that JSON has, such as dates in quotes") from None


SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def parse_sampling_defaults(value: object) -> str:
    """Parse numbers by the name of a sampling parameter, whose ranges the server checks; return them as JSON."""
    given = parse_object(value, '{"temperature": 0.5}')
    unknown = [name for name in given if name not in SAMPLING_DEFAULTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not supported, only {', '.join(SAMPLING_DEFAULTS)}")
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name!r} must be a number")
    return json.dumps(given)


def parse_origins(value: object) -> tuple[str, ...]:
    """Parse the origins of web pages: scheme://host[:port] each, or * for all; in vLLM, a text is a JSON list."""
    given = value if isinstance(value, list | tuple) else [value]
    parts = [
        parse_option_json(item) if isinstance(item, str) and item.lstrip().startswith("[") else item for item in given
    ]
    items = tuple(text for part in parts for text in parse_texts(part))
    if not all(item == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", item) for item in items):
        raise ValueError("expected origins such as https://chat.example.com, or *")
    return items


def parse_address(value: object) -> tuple[str, int]:
    """Parse "host:port" or "[IPv6]:port" into (host, port)."""
    host, _, port = str(value).rpartition(":")
    has_brackets = host.startswith("[")
    if has_brackets:
        host = host.removeprefix("[").removesuffix("]")
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not host or not is_port or (":" in host and not has_brackets):
        raise ValueError("expected host:port, such as 10.0.0.1:29500 or [fd00::1]:29500")
    return host, int(port)


def check_address(value: object) -> str:
    """Return the value as text if `parse_address` accepts it."""
    parse_address(value)
    return str(value)


def parse_metrics_prefix(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_:]*", value):
        raise ValueError("expected the beginning of a Prometheus metric name, such as serve_llm_ or vllm:")
    return value


def parse_traces_endpoint(value: object) -> str:
    """Parse a complete URL, including the path, as in OpenTelemetry's environment variable, or the URL of a file."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^/\s]+/[^\s]+|file:///[^\s]*[^\s/]", value):
        raise ValueError(
            "expected a URL with its path, such as http://localhost:4318/v1/traces (OTLP by HTTP, not gRPC), or "
            "file:///var/log/traces.jsonl"
        )
    return value
