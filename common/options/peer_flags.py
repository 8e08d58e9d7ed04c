"""Options of vLLM, SGLang, llama.cpp and Ollama, and their counterparts here.

`sources` reads the tables when an option is unknown: an equivalent option is accepted with a notice, everything else is
an error that says what to do. docs/from-*.md show the same tables.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from serve_llm.common.errors import OptionError
from serve_llm.common.options.llama_cpp_flags import LLAMA_CPP
from serve_llm.common.options.ollama_flags import OLLAMA, OLLAMA_COMMANDS, VLLM_COMMANDS
from serve_llm.common.options.parsers import parse_boolean
from serve_llm.common.options.peer_flag import PeerFlag
from serve_llm.common.options.sglang_flags import SGLANG
from serve_llm.common.options.vllm_flags import VLLM

logger = logging.getLogger(__name__)

PEER_FLAGS: dict[str, tuple[PeerFlag, ...]] = {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": LLAMA_CPP, "Ollama": OLLAMA}

PEER_COMMANDS = OLLAMA_COMMANDS | VLLM_COMMANDS


class FoundFlag(NamedTuple):
    """A flag of another engine that is not an option here."""

    engine: str
    flag: PeerFlag

    def refuse(self, name: str) -> OptionError:
        return OptionError(f"{name} is an option of {self.engine}: {self.flag.answer}")


def find_peer_flag(name: str) -> FoundFlag | None:
    """name: as on the command line, with dashes; `--compilation-config.mode` is a key of --compilation-config."""
    name = name.partition(".")[0]
    for engine, flags in PEER_FLAGS.items():
        for flag in flags:
            if name in flag.names:
                return FoundFlag(engine, flag)
    for flags in PEER_FLAGS.values():
        for flag in flags:
            if any("*" in pattern and fnmatchcase(name, pattern) for pattern in flag.names):
                return FoundFlag("another engine", flag)  # several flags are written like this
    return None


def list_accepted_flags() -> list[str]:
    """The long flags of other engines that are accepted here, with any value or with some."""
    return [
        name
        for flags in PEER_FLAGS.values()
        for flag in flags
        if not flag.is_refused
        for name in flag.names
        if name.startswith("--") and "*" not in name
    ]


def translate_arguments(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The command line with the flags of other engines replaced by ours. known: our own flags.

    Raises OptionError for a flag that has no counterpart.
    """
    models: list[str] = []
    translated: list[str] = []
    rest = iter(argv)
    for argument in rest:
        name, equals, value = _write_dashes(argument).partition("=")
        found = find_peer_flag(name) if argument.startswith("-") and name.partition(".")[0] not in known else None
        if found is not None and name not in found.flag.names and difflib.get_close_matches(name, known, 1, 0.9):
            found = None  # one of ours, mistyped, that happens to match a pattern
        if found is None:
            translated.append(name + equals + value if name in known else argument)
            continue
        words = _translate(found, name, _read_value(name, equals, value, rest) if found.flag.has_value else None)
        if found.flag.ours == "MODEL":
            models += words  # at the front, because --served-model-name takes all words that follow it
        else:
            translated += words
    return [*models, *translated]


def _write_dashes(argument: str) -> str:
    """`--max_model_len` as `--max-model-len`: vLLM reads both. A value, and a key after a dot, stay as they are."""
    match = re.match(r"--\w[\w-]*", argument)
    return argument if match is None else match[0].replace("_", "-") + argument[match.end() :]


def _read_value(name: str, equals: str, value: str, rest: Iterator[str]) -> str:
    if equals:
        return value
    following = next(rest, None)
    if following is None:
        raise OptionError(f"{name}: expected one argument")
    return following


def _translate(found: FoundFlag, name: str, value: str | None) -> list[str]:
    flag = found.flag
    if flag.depends_on_value:
        if not flag.allows(value):
            raise found.refuse(name)
        _log_notice(name, flag.answer)
        return []
    if not flag.is_accepted:
        raise found.refuse(name)
    _log_notice(name, flag.answer)
    if not flag.ours:
        return []
    if value is None:
        return flag.ours.split()
    return [value] if flag.ours == "MODEL" else [flag.ours, value]


def translate_name(name: str, value: object, source: str) -> tuple[str, object] | None:
    """Our option and its value for another engine's option in a file, the environment or a keyword.

    The name has underscores and may be ours, which is not looked for. Returns None for an unknown name, and ("", None)
    for an option that changes nothing. Raises OptionError for one that has no counterpart.
    """
    is_short = len(name) <= 2  # such as tp: short names are for the command line
    found = None if is_short else find_peer_flag("--" + name.replace("_", "-"))
    if found is None:
        return None
    if value is None:
        return "", None
    flag = found.flag
    if flag.depends_on_value:
        if not flag.allows(value):
            raise found.refuse(source)
        return "", None
    if flag.is_refused and _is_off(value):
        return "", None
    if flag.is_ignored:
        if value is not False:
            _log_notice(source, flag.answer)
        return "", None
    if not flag.is_accepted:
        raise found.refuse(source)
    if flag.takes_value:
        return flag.ours.lstrip("-").replace("-", "_").lower(), value
    try:
        is_on = parse_boolean(value)
    except ValueError as error:
        raise OptionError(f"{source}: {error}, not {value!r}") from None
    if not flag.ours:  # always on here
        if not is_on and not flag.may_be_off:
            raise found.refuse(source)
        return "", None
    if not is_on:
        return "", None
    option, _, fixed = flag.ours.removeprefix("--").partition(" ")
    return option.replace("-", "_"), fixed or True


def _is_off(value: object) -> bool:
    """Whether a file, a variable or a keyword says that something is not wanted: false, or nothing at all."""
    return value is False or value == "" or value == [] or value == {} or str(value).lower() == "false"


def _log_notice(name: str, answer: str) -> None:
    """`hold_records` keeps it until logging is configured; in commands without a log, Python writes it unformatted."""
    logger.warning("%s: %s", name, answer)
