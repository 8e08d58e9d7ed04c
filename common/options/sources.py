"""Read options from the command line, the --config file, the environment and Python keywords, and check them.

Must stay quick to import, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec

from serve_llm.common.errors import OptionError
from serve_llm.common.nesting import TOO_DEEP
from serve_llm.common.options.combinations import check_combinations
from serve_llm.common.options.fields import is_switch, option_name
from serve_llm.common.options.groups import OTHER_GROUP, find_groups
from serve_llm.common.options.help_text import DESCRIPTION, NOTES, HelpFormatter
from serve_llm.common.options.parsers import parse_boolean
from serve_llm.common.options.schema import OPTION_FIELDS, Options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Kind = TypeVar("Kind", bound="DataclassInstance")
Fields = Sequence[dataclasses.Field[object]]
Given = dict[str, tuple[object, str]]
"""Field name -> (value as given, its source as error messages name it: a flag, a variable, a key of a file)."""

ENVIRONMENT_PREFIX = "SERVE_LLM_"
_MAX_SHOWN = 1000  # characters of a value in an error message

# Kubernetes sets such variables for a Service whose name begins with serve-llm; they are addresses, not options.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Options from the command line (without the program's name), which beats the --config file, which beats the
    environment (SERVE_LLM_<OPTION>), which beats the defaults.

    Raises OptionError (one line that names the option), SystemExit after --help and --version."""
    flags = read_command_line(make_parser(notes=NOTES), argv)
    return merge_sources(flags, environ)


def make_options(model: str, **options: object) -> Options:
    """Options given in Python, as by `LLM(model, max_model_len="32k")`; None means the default. Raises OptionError."""
    given: Given = {"model": (model, "model")}
    for name, value in options.items():
        given |= _find_option(name, value, name)
    return build_options(given)


def merge_sources(flags: dict[str, object], environ: Mapping[str, str]) -> Options:
    """Build options from a command line's values by field name, from the file that its `config` names, and from the
    environment. Raises OptionError."""
    return build_options(collect_given(flags, environ))


def collect_given(flags: dict[str, object], environ: Mapping[str, str]) -> Given:
    """Return all explicitly given values, from which `merge_sources` builds options."""
    file = flags.pop("config", None)
    given = _read_environment(environ)
    if file is not None:
        given |= _read_file(Path(str(file)))
    return given | _label_flags(Options, flags)


def build_from_flags(kind: type[Kind], flags: Mapping[str, object]) -> Kind:
    """Build a dataclass of other options from a command line's values by field name. Raises OptionError."""
    return msgspec.convert(_parse_values(kind, _label_flags(kind, flags)), kind)


# Command line


def make_parser(
    program: str = "serve-llm",
    description: str = DESCRIPTION,
    options: Fields = OPTION_FIELDS,
    notes: str = "",
) -> argparse.ArgumentParser:
    """Return a parser for a command line with these options. It keeps every value as text. notes: end of its help."""
    parser = OptionParser(
        prog=program,
        usage=f"{program} MODEL [options]",
        description=description,
        epilog=f"Each option can also be set by {ENVIRONMENT_PREFIX}<OPTION>, for example "
        f"{ENVIRONMENT_PREFIX}MAX_MODEL_LEN=32k, or in the --config file; the command line beats the file, and the "
        "file beats the environment." + (f"\n\n{notes}" if notes else ""),
        formatter_class=HelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with options by name, such as `max-model-len: 32k`")
    titles = find_groups()
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        title = titles.get(option.name, OTHER_GROUP)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        text = _help_text(option).replace("%", "%%")
        flag = f"--{option_name(option)}"
        metavar = option.metadata.get("metavar") or option.name.upper()
        if option.name == "model":
            parser.add_argument("model", nargs="?", help=text)
        elif is_switch(option):
            group.add_argument(flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        elif option.metadata["nargs"]:
            group.add_argument(flag, action="extend", nargs="+", metavar=metavar, help=text)
        elif option.default == ():  # may be repeated
            group.add_argument(flag, action="append", metavar=metavar, help=text)
        elif option.metadata["short"]:
            group.add_argument(flag, f"-{option.metadata['short']}", dest=option.name, metavar=metavar, help=text)
        elif option.metadata["alias"]:
            group.add_argument(flag, f"--{option.metadata['alias']}", dest=option.name, metavar=metavar, help=text)
        else:
            group.add_argument(flag, dest=option.name, metavar=metavar, help=text)
    return parser


class OptionParser(argparse.ArgumentParser):
    """Raises OptionError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            message = self._explain_unknown(message.split()[2])
        raise OptionError(message.removeprefix("argument "))

    def _explain_unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {flag!r}; see {self.prog} --help"
        if flag in ("--host", "--port") and any(action.dest == "url" for action in self._actions):
            return f"unknown option {flag}; give the server's URL instead: {self.prog} http://HOST:PORT"
        close = difflib.get_close_matches(flag, self._option_string_actions, 1)
        return f"unknown option {flag}; {f'did you mean {close[0]}?' if close else f'see {self.prog} --help'}"

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Accept no abbreviations of single-dash names either: `-p 8080` is not `-pp 8080`."""
        return []


def _help_text(option: dataclasses.Field[object]) -> str:
    """Return the help of an option, with its default unless the text states it."""
    text = str(option.metadata["help"])
    default = option.default
    if default in (dataclasses.MISSING, None) or isinstance(default, tuple):
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{text} (default: {default})"


def read_command_line(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, object]:
    """Return the given values by field name. Raises OptionError for an unknown option, SystemExit after --version."""
    _show_help_about(parser, argv)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        from serve_llm.common.options.peer_flags import translate_arguments  # large tables, needed only here

        translated = translate_arguments(argv, parser._option_string_actions)
        namespace, unknown = parser.parse_known_args(translated)
    flags = cast(dict[str, object], vars(namespace))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            reason = _find_repeated(parser, argv, flag) or _explain_argument(flags.get("model"))
            raise OptionError(f"unexpected argument {flag!r}: {reason}")
        whole = flag.partition(".")[0]
        if whole in parser._option_string_actions:  # vLLM reads the keys of a JSON object this way
            raise OptionError(f"unknown option {flag}; give {whole} as one JSON object")
        raise OptionError(f"unknown option {flag}{_suggest(flag, '--', parser._option_string_actions, parser.prog)}")
    if flags.pop("version", False):
        from importlib.metadata import version  # slower than all other imports here

        sys.stdout.write(f"serve-llm {version('serve-llm')}\n")
        raise SystemExit(0)
    return flags


def _show_help_about(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """For `--help=WORD`, as in vLLM: show the options with this word in their name or group; for `--help=all`, all.

    Raises SystemExit after that, OptionError if there are none."""
    words = [argument.removeprefix("--help=") for argument in argv if argument.startswith("--help=")]
    if not words:
        return
    word = words[0].strip("-").replace("_", "-").lower()
    if word == "all":
        parser.print_help()
        raise SystemExit(0)
    formatter = parser._get_formatter()
    shown = [
        action
        for group in parser._action_groups
        for action in group._group_actions
        if word in (group.title or "").lower() or any(word in name for name in action.option_strings)
    ]
    if not shown:
        raise OptionError(f"no option or group has {word!r} in its name; see {parser.prog} --help")
    formatter.add_arguments(shown)
    sys.stdout.write(formatter.format_help())
    raise SystemExit(0)


def _find_repeated(parser: argparse.ArgumentParser, argv: Sequence[str], argument: str) -> str | None:
    """Explain an argument that follows the value of an option which takes one value each time."""
    index = argv.index(argument) if argument in argv else 0
    option = argv[index - 2] if index >= 2 else ""
    if isinstance(parser._option_string_actions.get(option), argparse._AppendAction):
        return f"give {option} again for each value"
    return None


def _explain_argument(model: object) -> str:
    """Explain why an argument is unexpected. model: the argument that was taken for the model."""
    from serve_llm.common.options.peer_flags import PEER_COMMANDS

    return PEER_COMMANDS.get(str(model), "one model is served, given first")


def _label_flags(kind: type[DataclassInstance], flags: Mapping[str, object]) -> Given:
    names = {option.name: f"--{option_name(option)}" for option in dataclasses.fields(kind)} | {"model": "model"}
    return {name: (value, names[name]) for name, value in flags.items()}


# Environment and file


def _read_environment(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if is_service_address(name, value):
            continue
        given |= _find_option(name.removeprefix(ENVIRONMENT_PREFIX).lower(), value, name, ENVIRONMENT_PREFIX)
    return given


def is_service_address(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service."""
    return bool(_KUBERNETES_NAME.search(name) or _KUBERNETES_VALUE.match(value))


def _read_file(path: Path) -> Given:
    import yaml  # slow to import

    try:
        content = cast(object, yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except RecursionError:
        raise OptionError(f"--config {path}: {TOO_DEEP}") from None
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
        given |= _find_option(str(name), value, f"{name} in {path}")
    return given


# Names


def _find_option(name: str, value: object, source: str, prefix: str = "") -> Given:
    """Return the option that a file, the environment or a keyword names: by its field, its flag, or `no_` and the flag
    of a boolean. Empty if the value is None. Raises OptionError for an unknown name."""
    plain = name.replace("-", "_")
    for option in OPTION_FIELDS:
        flag = option_name(option).replace("-", "_")
        is_negated = is_switch(option) and plain == f"no_{flag}"
        names = {option.name, flag, (option.metadata.get("alias") or flag).replace("-", "_")}
        if plain not in names and not is_negated:
            continue
        if value is None:
            return {}
        if is_negated:
            value = not _parse(parse_boolean, value, source)
        return {option.name: (value, source)}
    from serve_llm.common.options.peer_flags import translate_name  # large tables, needed only here

    translated = translate_name(plain, value, source)
    if translated is not None:
        ours, value = translated
        return _find_option(ours, value, source, prefix) if ours else {}
    flags = {f"--{option_name(option)}" for option in OPTION_FIELDS}
    flags |= {f"--no-{option_name(option)}" for option in OPTION_FIELDS if is_switch(option)}
    raise OptionError(f"unknown option {source}{_suggest(plain, prefix, flags)}")


def _suggest(name: str, prefix: str, flags: Collection[str], program: str = "serve-llm") -> str:
    """Return '; did you mean ...?' in the spelling of the source of the unknown name, which `prefix` identifies.

    flags: our own. Accepted ones of other engines are suggested too: the nearest of ours to --disable-log-request would
    be --enable-log-requests."""
    from serve_llm.common.options.peer_flags import list_accepted_flags  # large tables, needed only here

    known = sorted({flag for flag in flags if flag.startswith("--")}.union(list_accepted_flags()))
    close = difflib.get_close_matches("--" + name.strip("-").replace("_", "-").lower(), known, n=1, cutoff=0.65)
    if not close:
        return f"; see {program} --help"
    nearest = close[0].removeprefix("--")
    if prefix != "--":
        nearest = nearest.replace("-", "_")
    if prefix == ENVIRONMENT_PREFIX:
        nearest = nearest.upper()
    return f"; did you mean {prefix}{nearest}?"


# Values


def _parse(parse: Callable[[object], T], value: object, source: str, is_secret: bool = False) -> T:
    try:
        return parse(value)
    except ValueError as error:
        shown = "" if is_secret else f", not {_shorten(repr(value))}"
        raise OptionError(f"{source}: {error}{shown}") from None


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _parse_values(kind: type[DataclassInstance], given: Given) -> dict[str, object]:
    values: dict[str, object] = {}
    for option in dataclasses.fields(kind):
        if option.name in given:
            value, source = given[option.name]
            is_secret = option.metadata.get("secret", False)
            values[option.name] = _parse(option.metadata["parse"], value, source, is_secret)
    return values


def _explain_missing_model(given: Given) -> str:
    """Name the option of the command line that may have taken the model for one of its values."""
    for option in OPTION_FIELDS:
        value, source = given.get(option.name, ((), ""))
        if option.metadata.get("nargs") and source.startswith("--") and isinstance(value, list) and len(value) > 1:
            return f"; {source} takes all words that follow it, so put the model before it"
    return ""


def build_options(given: Given, *, needs_model: bool = True) -> Options:
    """Parse every value and check how they combine. Raises OptionError."""
    values = _parse_values(Options, given)
    if "model" not in values:
        if needs_model and not values.get("node_rank"):
            raise OptionError(
                "no model: give a checkpoint directory, a Hugging Face id, or `demo` for the bundled model"
                + _explain_missing_model(given)
            )
        values["model"] = ""  # node 0 sends it, or the server sends it to a front end
    options = msgspec.convert(values, Options)
    check_combinations(options)
    return options
