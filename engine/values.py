"""How the values of options are read: text from a command line, plain values from YAML or Python.

Each parser returns the value or raises ValueError saying what it expected; `options` adds which option and where.
Knows no option by name; standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

Parse = Callable[[object], object]
"""Turns text (command line, environment) or a plain value (YAML, keyword) into the field's value, or raises ValueError
saying what was expected."""

QUEUE = (2048, 4 * 2**20)  # requests and prompt tokens that may wait

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_count(value: object) -> int:
    """A count: 32768, "32768", "32k" = 32,000 or "32K" = 32,768, as in vLLM: small letters are powers of 1000 and take
    decimals ("1.5k"), capital letters are powers of 1024 and do not. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", str(value).strip())
    if isinstance(value, bool) or match is None or ("." in match[1] and not match[2].islower()):
        raise ValueError('expected a whole number, or one with a unit: "32k" is 32,000 and "32K" is 32,768')
    return _scale(match[1], _COUNT_UNITS[match[2]])


def parse_bytes(value: object) -> int:
    """Bytes: 1073741824, "8GiB" and "8g" (powers of 1024), "8GB" (powers of 1000); letters of either case, decimals
    allowed. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, bool) or match is None or match[2] not in _BYTE_UNITS:
        raise ValueError('expected bytes, such as 8589934592, "8GiB" or "512MiB"')
    return _scale(match[1], _BYTE_UNITS[match[2]])


def _scale(number: str, unit: int) -> int:
    whole, _, decimals = number.partition(".")
    scale: int = 10 ** len(decimals)
    return int(whole + decimals) * unit // scale  # exact, unlike float


def positive(parse: Callable[[object], int]) -> Parse:
    """What `parse` reads, if it is at least 1."""

    def checked(value: object) -> int:
        number = parse(value)
        if number < 1:
            raise ValueError("must be at least 1")
        return number

    return checked


def whole(low: int, high: int) -> Parse:
    """A whole number from `low` to `high`, both included."""

    def checked(value: object) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)) or not low <= int(str(value)) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(str(value))

    return checked


def positive_numbers(value: object) -> tuple[float, ...]:
    """Several numbers above 0: a list, or text with commas."""
    try:
        numbers = tuple(float(item) for item in _items(value))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError("expected numbers above 0 with commas between them, such as 3,1")
    return numbers


def positive_counts(value: object) -> tuple[int, ...]:
    """Several whole numbers of at least 1: a list, or text with commas."""
    numbers = [int(item) for item in _items(value) if re.fullmatch(r"[0-9]+", item)]
    if not numbers or len(numbers) < len(_items(value)) or min(numbers) < 1:
        raise ValueError("expected whole numbers of at least 1 with commas between them, such as 9,8,7")
    return tuple(numbers)


def _items(value: object) -> list[str]:
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(item).strip() for item in items]


def block_size(value: object) -> int:
    """A power of two from 8 to 256."""
    sizes = (8, 16, 32, 64, 128, 256)
    if isinstance(value, bool) or str(value) not in map(str, sizes):
        raise ValueError(f"expected one of {', '.join(map(str, sizes))}")
    return int(str(value))


def cache_dtype(value: object) -> str:
    """A number type of the KV cache: auto or int8."""
    if "fp8" in str(value).lower():
        raise ValueError("fp8 is not served, the type of 8 bits here is int8; expected auto or int8")
    return str(choice("auto", "int8")(value))


def share(value: object) -> float:
    """A number above 0 and at most 1."""
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise ValueError("expected a number above 0 and at most 1")
    return number


def seconds(value: object) -> float:
    """A time above 0, at most a year."""
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if isinstance(value, bool) or not 0.0 < number <= 365 * 86400:
        raise ValueError("expected seconds, a number above 0")
    return number


def queue(value: object) -> tuple[int, int]:
    """Requests and prompt tokens: "1024,4M" or a list of both; the tokens may be left out."""
    items = _items(value)
    if len(items) not in (1, 2):
        raise ValueError('expected requests, or requests and prompt tokens with a comma between, such as "1024,4M"')
    if min(numbers := [parse_count(item) for item in items]) < 1:
        raise ValueError("must be at least 1")
    return numbers[0], numbers[1] if len(numbers) == 2 else QUEUE[1]


def origin(value: object) -> tuple[str, ...]:
    """Origins of web pages: scheme://host[:port] each, or * for all."""
    items = texts(value)
    if not all(item == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", item) for item in items):
        raise ValueError("expected origins such as https://chat.example.com, or *")
    return items


def boolean(value: object) -> bool:
    """True or false, also as 1, yes, on, 0, no, off."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError("expected true or false")
    return words[str(value).lower()]


def text(value: object) -> str:
    """Any text but the empty one: `--api-key "$UNSET"` must not open the server."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected some text (quote numbers in YAML)")
    return value


def parse_address(value: object) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6]:port". Raises ValueError."""
    host, _, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    whole = host and port.isdecimal() and 0 < int(port) < 65536
    if not whole or (":" in host and not str(value).startswith("[")):
        raise ValueError("expected host:port, such as 10.0.0.1:29500 or [fd00::1]:29500")
    return host, int(port)


def address(value: object) -> str:
    """What `parse_address` reads."""
    parse_address(value)
    return str(value)


def metric_prefix(value: object) -> str:
    """What a Prometheus metric name may begin with."""
    if not isinstance(value, str) or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_:]*", value):
        raise ValueError("expected the beginning of a Prometheus metric name, such as serve_llm_ or vllm:")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Several texts: a list, or one text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not items:
        raise ValueError("expected one text or a list of them")
    return tuple(text(item) for item in items)


def choice(*allowed: str) -> Parse:
    """One of the words, in letters of either case."""

    def checked(value: object) -> str:
        if str(value).lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(value).lower()

    return checked
