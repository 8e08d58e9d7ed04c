"""A field of a dataclass of options: its parser, its text for --help, and the name that it has on a command line.

Knows no option by name; the standard library and `values` only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from typing import TypeVar

from serve_llm.engine import values

T = TypeVar("T")

Fields = Sequence[dataclasses.Field[object]]


def option(
    default: T,
    parse: values.Parse,
    help: str,
    *,
    shown: str = "",
    flag: str = "",
    short: str = "",
    repeat: bool = False,
    secret: bool = False,
) -> T:
    """A field of options. `shown`: the value's name in --help. `flag`: the option's name where it is not the field's.
    `short`: a second name on the command line. `repeat`: several values after one flag. `secret`: never shown."""
    metadata = {"parse": parse, "help": help, "shown": shown, "flag": flag, "short": short}
    return field(default=default, metadata=metadata | {"repeat": repeat, "secret": secret}, repr=not secret)


def option_name(field: dataclasses.Field[object]) -> str:
    """The option's name, without dashes in front: `max-model-len`."""
    return (field.metadata.get("flag") or field.name).replace("_", "-")


def help_text(field: dataclasses.Field[object]) -> str:
    """The option's help with its default, where the text does not say it in words."""
    text = str(field.metadata["help"])
    if field.default in (dataclasses.MISSING, None) or isinstance(field.default, tuple):
        return text
    shown = {True: "on", False: "off"}.get(field.default) if isinstance(field.default, bool) else field.default
    return f"{text} (default: {shown})"
