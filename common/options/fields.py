"""Dataclass fields that are options: with a parser, a help text and the ways to name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import TypeVar

from serve_llm.common.options.parsers import Parse, one_of, parse_boolean

T = TypeVar("T")


def option(
    default: T,
    parse: Parse,
    help: str,
    *,
    metavar: str = "",
    flag: str = "",
    short: str = "",
    alias: str = "",
    nargs: bool = False,
    secret: bool = False,
) -> T:
    """A field of a dataclass of options.

    metavar: the value's name in --help. flag: the option's name, if it differs from the field's. short: a second name
    on the command line, with one dash. alias: a second name everywhere. nargs: one flag takes several values. secret:
    never show the value in logs and errors.
    """
    metadata = {"parse": parse, "help": help, "metavar": metavar, "flag": flag, "short": short, "alias": alias}
    return field(default=default, metadata=metadata | {"nargs": nargs, "secret": secret}, repr=not secret)


def choice_option(default: T, words: str, help: str, synonyms: Mapping[str, str] | None = None) -> T:
    """An option whose value is one of `words`, which are separated by `|`. synonyms: other spellings of words."""
    return option(default, one_of(*words.split("|"), synonyms=synonyms), help, metavar=words)


def option_name(field: dataclasses.Field[object]) -> str:
    """The option's name without leading dashes: `max-model-len`."""
    return (field.metadata.get("flag") or field.name).replace("_", "-")


def is_switch(field: dataclasses.Field[object]) -> bool:
    """Whether the option is on or off, so that `--no-` before its name turns it off."""
    return field.metadata.get("parse") is parse_boolean
