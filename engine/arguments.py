"""Options from the command line, the --config file and the environment. Torch-free and quick to import."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from serve_llm.engine.errors import OptionError
from serve_llm.engine.fields import Fields, help_text, option_name
from serve_llm.engine.given import Given, build, named, nearest
from serve_llm.engine.options import ENVIRONMENT_PREFIX, Options, fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind", bound="DataclassInstance")

# Kubernetes sets these for a Service whose name begins with serve-llm; they are addresses, not options.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Options from the command line (without the program's name), which beats the --config file, which beats the
    environment (SERVE_LLM_<OPTION>), which beats the defaults.

    Raises OptionError (one line that names the option), SystemExit after --help and --version."""
    return merge(read_command_line(make_parser(), fields(), argv), environ)


def read_command_line(parser: argparse.ArgumentParser, options: Fields, argv: Sequence[str]) -> dict[str, object]:
    """What was given, by field name. Raises OptionError for what is not among the options."""
    found, unknown = parser.parse_known_args(list(argv))
    given = cast(dict[str, object], vars(found))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise OptionError(f"unexpected argument {flag!r}: one model is served, given first")
        raise OptionError(f"unknown option {flag}{nearest(flag, '--', options, parser.prog)}")
    if given.pop("version", False):
        from importlib.metadata import version  # costs more than all other imports here

        sys.stdout.write(f"serve-llm {version('serve-llm')}\n")
        raise SystemExit(0)
    return given


def merge(given: dict[str, object], environ: Mapping[str, str]) -> Options:
    """Options from a command line's, by field name, with the file that its `config` names, and the environment."""
    file = given.pop("config", None)
    merged = _from_environment(environ)
    if file is not None:
        merged |= _from_file(Path(str(file)))
    merged |= by_flag(Options, given)
    return build(Options, merged)


def by_flag(kind: type[Kind], given: Mapping[str, object]) -> Given:
    """Values with the names under which a command line gave them."""
    flags = {option.name: f"--{option_name(option)}" for option in dataclasses.fields(kind)} | {"model": "model"}
    return {name: (value, flags[name]) for name, value in given.items()}


def make_parser(
    program: str = "serve-llm",
    description: str = "Serve a language model behind the OpenAI API. Other commands: `serve-llm plan MODEL` says "
    "whether a model fits, and how to spread it over GPUs and machines, before anything is loaded; `serve-llm check "
    "[MODEL]` finds out whether this host, or several together, can serve.",
    options: Fields | None = None,
) -> argparse.ArgumentParser:
    """The shape of a command line with these options (default: all of the daemon's); values stay text, `build` parses
    them like those of the other sources."""
    parser = _Parser(
        prog=program,
        description=description,
        epilog=f"Each option can also be set by {ENVIRONMENT_PREFIX}<OPTION>, for example "
        f"{ENVIRONMENT_PREFIX}MAX_MODEL_LEN=32k, or in the --config file; the command line beats the file, and the "
        "file beats the environment.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and leave")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with options by name, such as `max-model-len: 32k`")
    for option in fields() if options is None else options:
        text = help_text(option).replace("%", "%%")
        flag, shown = f"--{option_name(option)}", option.metadata.get("shown") or option.name.upper()
        if option.name == "model":
            parser.add_argument("model", nargs="?", help=text)
        elif isinstance(option.default, bool):
            parser.add_argument(flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        elif option.metadata["repeat"]:
            parser.add_argument(flag, action="extend", nargs="+", metavar=shown, help=text)
        elif option.default == ():  # several
            parser.add_argument(flag, action="append", metavar=shown, help=text)
        else:
            names = [flag, *(f"-{short}" for short in (option.metadata["short"],) if short)]
            parser.add_argument(*names, dest=option.name, metavar=shown, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


def _from_environment(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if _KUBERNETES_NAME.search(name) or _KUBERNETES_VALUE.match(value):
            continue
        given |= named(name.removeprefix(ENVIRONMENT_PREFIX).lower(), value, name, ENVIRONMENT_PREFIX)
    return given


def _from_file(path: Path) -> Given:
    import yaml  # only who has a file pays for it

    try:
        content = cast(object, yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:  # without the line itself, which may hold a secret
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise OptionError(f"--config {path}: not YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: expected lines such as `max-model-len: 32k`")
    given: Given = {}
    for name, value in content.items():
        given |= named(str(name), value, f"{name} in {path}")
    return given
