"""`serve-llm completion bash|zsh|fish`: print a script that completes commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from serve_llm.cli import front_end, run_batch, scale, top
from serve_llm.cli.bench import offline, serve, start
from serve_llm.cli.chat import command as chat
from serve_llm.cli.check import __main__ as check
from serve_llm.cli.convert import command as convert
from serve_llm.cli.plan import command as plan
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_parser

INSTALL = {
    "bash": 'add to ~/.bashrc: eval "$(serve-llm completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit: eval "$(serve-llm completion zsh)"',
    "fish": "serve-llm completion fish > ~/.config/fish/completions/serve-llm.fish",
}
_FILES = ("FILE", "DIR", "DIRECTORY", "FILE.yaml", "FILE.jsonl", "NAME|FILE", "off|memory|FILE")


class CompletedOption(NamedTuple):
    names: tuple[str, ...]
    help: str
    values: tuple[str, ...]  # choices; empty if any value is allowed
    takes_value: bool
    takes_file: bool


def main(argv: Sequence[str]) -> int:
    """Print the script. Return 0. Raises OptionError for another shell."""
    if list(argv) in (["-h"], ["--help"]):
        sys.stdout.write("usage: serve-llm completion bash|zsh|fish\n\n" + "\n".join(INSTALL.values()) + "\n")
        return 0
    if len(argv) != 1 or argv[0] not in INSTALL:
        raise OptionError(f"completion: expected one of {', '.join(INSTALL)}")
    sys.stdout.write(format_script(argv[0], {name: read_options(make()) for name, make in PARSERS.items()}))
    return 0


# Command, of one word or two -> its parser; "" is the server's, whose first argument is a model.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "": make_parser,
    "serve": make_parser,
    "chat": chat.create_parser,
    "bench serve": serve.create_parser,
    "bench latency": offline.create_latency_parser,
    "bench throughput": offline.create_throughput_parser,
    "bench start": start.create_parser,
    "top": top.create_parser,
    "front-end": front_end.create_parser,
    "scale": scale.create_parser,
    "plan": plan.create_parser,
    "check": check.make_parser,
    "collect-env": argparse.ArgumentParser,  # the command itself imports torch
    "run-batch": run_batch.create_parser,
    "convert": convert.create_parser,
    "completion": argparse.ArgumentParser,
}
# Command -> the words that may follow it.
SECOND_WORDS = {"bench": ("serve", "latency", "throughput", "start"), "completion": tuple(INSTALL)}


def read_options(parser: argparse.ArgumentParser) -> list[CompletedOption]:
    found = []
    for action in parser._actions:
        if not action.option_strings:
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        takes_value = action.nargs != 0
        values = tuple(action.choices) if action.choices else ()
        if not values and "|" in metavar:
            values = tuple(word for word in metavar.split("|") if word.islower())
        text = (action.help or "").replace("%%", "%")
        takes_file = takes_value and metavar in _FILES
        found.append(CompletedOption(tuple(action.option_strings), text, values, takes_value, takes_file))
    return found


def format_script(shell: str, commands: Mapping[str, Sequence[CompletedOption]]) -> str:
    """Return the script. commands: the options of each; "" stands for the server, whose first argument is a model."""
    return {"bash": _format_bash, "zsh": _format_zsh, "fish": _format_fish}[shell](commands)


def _format_bash(commands: Mapping[str, Sequence[CompletedOption]]) -> str:
    """Return functions that only list words, and one that chooses among them."""
    names = _find_first_words(commands)
    flag_cases = []
    value_cases = []
    for command, options in commands.items():
        flags = " ".join(name for option in options for name in option.names)
        pattern = f'"{command}"' if command else "*"
        flag_cases.append(f"        {pattern}) words='{flags}' ;;")
        for option in options:
            pattern = "|".join(f'"{command or "-"}:{name}"' for name in option.names)
            if option.values:
                value_cases.append(f"        {pattern}) words='{' '.join(option.values)}'; files={_flag(option)} ;;")
            elif option.takes_value:
                value_cases.append(f"        {pattern}) words=''; files={_flag(option)} ;;")
    # The server's options come last in the first case, because its pattern matches everything.
    flag_cases.sort(key=lambda line: line.lstrip().startswith("*"))
    second_cases = [
        f"                        2:{command}) words='{' '.join(words)}'; files=\"\" ;;"
        for command, words in SECOND_WORDS.items()
    ]
    return _BASH.format(
        names=" ".join([*names, "demo"]),
        pattern="|".join(names),
        flags="\n".join(flag_cases),
        values="\n".join(value_cases),
        seconds="\n".join(second_cases),
    )


def _find_first_words(commands: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(command.partition(" ")[0] for command in commands if command))


def _flag(option: CompletedOption) -> str:
    return "1" if option.takes_file else ""


_BASH = """\
_serve_llm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="-" words="" files=1
    # bash takes the = of --option=value for a word of its own
    [ "$previous" = "=" ] && previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    [ "$current" = "=" ] && current=""
    case "${{COMP_WORDS[1]}}" in
        {pattern}) [ "$COMP_CWORD" -gt 1 ] && command="${{COMP_WORDS[1]}}" ;;
    esac
    [ "$command" = bench ] && [ "$COMP_CWORD" -gt 2 ] && command="bench ${{COMP_WORDS[2]}}"
    case "$command:$previous" in
{values}
        *)
            case "$current" in
                -*)
                    files=""
                    case "$command" in
{flags}
                    esac ;;
                *)
                    case "$COMP_CWORD:$command" in
                        1:*) words='{names}' ;;
{seconds}
                    esac ;;
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ -n "$files" ] && COMPREPLY+=($(compgen -f -- "$current"))
    return 0
}}
complete -o filenames -F _serve_llm serve-llm
"""


def _format_zsh(commands: Mapping[str, Sequence[CompletedOption]]) -> str:
    """zsh's _arguments takes the options with their help."""
    lines = ["#compdef serve-llm", "_serve_llm() {", "    local -a options", '    case "${words[2]} ${words[3]}" in']
    for command, options in sorted(commands.items(), key=lambda item: not item[0]):
        pattern = f"'{command}'" if " " in command else f"'{command} '*"
        lines.append(f"        {pattern if command else '*'})")
        lines.append("            options=(")
        lines += [
            f"                {_quote(_zsh_argument(name, option))}" for option in options for name in option.names
        ]
        lines += ["            ) ;;"]
    names = " ".join([*_find_first_words(commands), "demo"])
    lines += [
        "    esac",
        "    if (( CURRENT == 2 )) && [[ ${words[2]} != -* ]]; then",
        f"        compadd -- {names}",
        "        _files",
    ]
    for first, seconds in SECOND_WORDS.items():
        lines.append(f"    elif (( CURRENT == 3 )) && [[ ${{words[2]}} == {first} && ${{words[3]}} != -* ]]; then")
        lines.append(f"        compadd -- {' '.join(seconds)}")
    lines += [
        "    else",
        "        _arguments -S $options '*:file:_files'",
        "    fi",
        "}",
        "compdef _serve_llm serve-llm",
    ]
    return "\n".join(lines) + "\n"


def _zsh_argument(name: str, option: CompletedOption) -> str:
    text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    spec = f"*{name}[{text}]"
    if not option.takes_value:
        return spec
    if option.values:
        return f"{spec}:value:({' '.join(option.values)})"
    return f"{spec}:value:{'_files' if option.takes_file else ' '}"


def _format_fish(commands: Mapping[str, Sequence[CompletedOption]]) -> str:
    names = _find_first_words(commands)
    lines = [f"complete -c serve-llm -n __fish_use_subcommand -a {_quote(' '.join([*names, 'demo']))}"]
    for first, seconds in SECOND_WORDS.items():
        words = " ".join(seconds)
        condition = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {words}"
        lines.append(f"complete -c serve-llm -n {_quote(condition)} -f -a {_quote(words)}")
    for command, options in commands.items():
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        if not command:
            condition = f"not __fish_seen_subcommand_from {' '.join(names)}"
        elif command in SECOND_WORDS["bench"]:
            condition += "; and not __fish_seen_subcommand_from bench"
        for option in options:
            lines.append(_fish_line(condition, option))
    return "\n".join(lines) + "\n"


def _fish_line(condition: str, option: CompletedOption) -> str:
    words = [f"complete -c serve-llm -n {_quote(condition)}"]
    for name in option.names:
        if name.startswith("--"):
            words.append(f"-l {name[2:]}")
        else:
            words.append(f"{'-s' if len(name) == 2 else '-o'} {name[1:]}")
    if option.values and not option.takes_file:
        words.append(f"-x -a {_quote(' '.join(option.values))}")
    elif option.takes_file:
        words.append("-r -F")
    elif option.takes_value:
        words.append("-x")
    words.append(f"-d {_quote(option.help)}")
    return " ".join(words)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
