"""Types of fields set by Python callers: convert values with an unambiguous meaning, and name the field otherwise."""

from __future__ import annotations

import difflib
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import msgspec

from serve_llm.server.http.errors import InvalidRequest

Convert = Callable[[Any, str], Any]  # (value, field name) -> value of the field's type; raises InvalidRequest


def convert_fields(struct: msgspec.Struct) -> None:
    """Convert the values of a struct's fields to their declared types, in place. A None where the type has none counts
    as absent. Raises InvalidRequest, which names the field."""
    for name, default, is_optional, convert in _read_fields(type(struct)):
        value = getattr(struct, name)
        if value is default or (value is None and is_optional):
            continue
        if value is None and default is not msgspec.NODEFAULT:
            converted = default
        else:
            converted = convert(value, name)
        if converted is not value:
            msgspec.structs.force_setattr(struct, name, converted)


def to_int(value: Any, name: str) -> int:
    """Convert a Python or NumPy integer, or a float without a fraction."""
    if type(value) is int:
        return value
    plain = _to_plain(value)
    if isinstance(plain, int) and not isinstance(plain, bool):
        return int(plain)
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    raise _refuse(value, name, "an integer")


def to_ids(value: Any, name: str) -> list[int]:
    if type(value) is list and set(map(type, value)) <= {int}:
        return cast("list[int]", value)
    return [to_int(item, name) for item in _iterate(value, name, "a list of integers")]


def _to_count(value: Any, name: str) -> int | None:
    """Like `to_int`, but accept vLLM's True for 1; False becomes None."""
    if isinstance(value, bool):
        return 1 if value else None
    return to_int(value, name)


def _to_number(value: Any, name: str) -> float:
    if type(value) is float or type(value) is int:
        return value
    plain = _to_plain(value)
    if isinstance(plain, numbers.Real) and not isinstance(plain, bool):
        return float(plain)
    raise _refuse(value, name, "a number")


def _to_bool(value: Any, name: str) -> bool:
    plain = _to_plain(value)
    if isinstance(plain, bool):
        return plain
    raise _refuse(value, name, "True or False")


def _to_strings(value: Any, name: str) -> list[str]:
    items = _iterate(value, name, "a list of strings")
    if all(isinstance(item, str) for item in items):
        return items
    raise _refuse(value, name, "a list of strings")


def _to_string_or_strings(value: Any, name: str) -> str | list[str]:
    return value if isinstance(value, str) else _to_strings(value, name)


def _to_string(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    raise _refuse(value, name, "a string")


def _to_biases(value: Any, name: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(value, name, "a dict of token ids and numbers")
    if type(value) is dict and set(map(type, value)) <= {int} and set(map(type, value.values())) <= {int, float}:
        return value
    biases = {}
    for key, bias in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit()  # JSON has no other keys
        biases[to_int(int(key) if is_digits else key, f"{name}: a token id")] = _to_number(bias, name)
    return biases


def _to_struct(kind: type[msgspec.Struct]) -> Convert:
    def convert(value: Any, name: str) -> Any:
        """Check the fields of an object of this class, or create one from a dict of its fields."""
        if isinstance(value, kind):
            fields = msgspec.structs.asdict(value)
        elif isinstance(value, Mapping):
            fields = dict(value)
            unknown = next((key for key in fields if key not in kind.__struct_fields__), None)
            if unknown is not None:
                close = difflib.get_close_matches(str(unknown), kind.__struct_fields__, n=1)
                suggestion = f"; did you mean {close[0]}?" if close else ""
                raise InvalidRequest(f"unknown field {name}.{unknown}{suggestion}", f"{name}.{unknown}")
        else:
            raise _refuse(value, name, f"a {kind.__name__} or a dict of its fields")
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            reason, _, path = str(error).partition(" - at `$")
            param = name + path.removesuffix("`")
            raise InvalidRequest(f"{param}: {reason[0].lower()}{reason[1:].replace('`', '')}", param) from None

    return convert


def _to_plain(value: Any) -> Any:
    """Return the Python number in a scalar of NumPy or torch."""
    item = getattr(value, "item", None)
    if item is None or getattr(value, "ndim", 1) != 0:
        return value
    return item()


def _iterate(value: Any, name: str, wanted: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(value, name, wanted)
    return value if type(value) is list else list(value)


def _refuse(value: Any, name: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {value!r:.100}", name.partition(":")[0])


_CONVERTERS: dict[Any, Convert] = {
    int: to_int,
    int | None: to_int,
    float: _to_number,
    bool: _to_bool,
    list[int] | None: to_ids,
    list[str] | None: _to_strings,
    str | list[str] | None: _to_string_or_strings,
    Literal["left", "right"]: _to_string,
    dict[int, float] | None: _to_biases,
}


@functools.cache
def _read_fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any, bool, Convert]]:
    """Return (name, default, whether it may be None, conversion) of each field."""
    found = []
    for field in msgspec.structs.fields(kind):
        members = getattr(field.type, "__args__", ())
        structs = [member for member in members if isinstance(member, type) and issubclass(member, msgspec.Struct)]
        convert = _to_struct(structs[0]) if structs else _CONVERTERS[field.type]
        if field.name in ("logprobs", "prompt_logprobs"):
            convert = _to_count
        found.append((field.name, field.default, type(None) in members, convert))
    return found
