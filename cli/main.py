"""The `serve-llm` command: read the command line and run the daemon or another command.

Most imports are in functions: `main` ends quietly on a Ctrl-C that arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from serve_llm.common.errors import OptionError, ServeError


def main() -> int:
    try:
        return run_program(sys.argv[1:])
    except KeyboardInterrupt:  # nothing runs yet that would need an orderly end
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a shell sees it and ends its loop too
        return 128 + signal.SIGINT


def run_program(argv: list[str]) -> int:
    """Return the exit code."""
    try:
        if argv in (["help"], ["version"]):
            argv = [f"--{argv[0]}"]
        command = COMMANDS.get(argv[0]) if argv else None
        if command is not None:
            return run_command(command, argv[1:])
        return serve(argv)
    except ServeError as error:
        from serve_llm.common.logs import write_final_error

        with contextlib.suppress(OSError):  # stderr may go to a full disk or a closed pipe
            write_final_error(error)
        return error.exit_code


def run_command(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Return the exit code; if stdout is a closed pipe, that of a program ended by SIGPIPE."""
    try:
        exit_code = command(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return 128 + signal.SIGPIPE
    return exit_code


def serve(argv: Sequence[str]) -> int:
    from serve_llm.common.logs import hold_records
    from serve_llm.common.options.peer_variables import log_unread
    from serve_llm.common.options.sources import parse_args

    check_first_word(argv)
    with hold_records(argv, os.environ):
        options = parse_args(argv, os.environ)
        log_unread(os.environ)
    if options.node_rank:
        # Other nodes serve no HTTP, so they run the follower program instead of the server.
        replace_process("serve_llm.engine.distributed.multihost.follower", argv)
    from serve_llm.server import daemon  # imported late, so that --help and a mistyped option answer at once

    return daemon.run(options)


def check_first_word(argv: Sequence[str]) -> None:
    """Raise OptionError if the model seems to be a command: another engine's, or a mistyped one of ours."""
    word = argv[0] if argv else ""
    if os.path.exists(word):
        return
    from serve_llm.common.options.peer_flags import PEER_COMMANDS  # imports large tables that are only needed here

    if "://" in word:
        raise OptionError(
            f"{word} is no model; a model is a directory or a Hugging Face id (organisation/name), and `serve-llm chat "
            "URL`, `bench serve URL` and `top URL` talk to a running server"
        )
    if word in PEER_COMMANDS:
        raise OptionError(PEER_COMMANDS[word])
    close = difflib.get_close_matches(word, COMMANDS, 1, 0.75)
    if close and len(argv) > 1 and not argv[1].startswith("-"):  # a model is a single argument
        raise OptionError(f"unknown command {word!r}; did you mean {close[0]}?")


def check(argv: Sequence[str]) -> int:
    replace_process("serve_llm.cli.check", argv)


def collect_env(argv: Sequence[str]) -> int:
    replace_process("serve_llm.cli.collect_env", argv)


def complete(argv: Sequence[str]) -> int:
    from serve_llm.cli import completion

    return completion.main(argv)


def import_command(module: str) -> Callable[[Sequence[str]], int]:
    """Return a command that imports the module when it runs, and calls its `main`."""

    def run(argv: Sequence[str]) -> int:
        main: Callable[[Sequence[str], Mapping[str, str]], int] = import_module(module).main
        return main(argv, os.environ)

    return run


def replace_process(module: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process with another program, which may import torch."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *argv])


# First argument -> the command that takes the other arguments.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "bench": import_command("serve_llm.cli.bench.command"),
    "chat": import_command("serve_llm.cli.chat.command"),
    "check": check,
    "collect-env": collect_env,
    "completion": complete,
    "convert": import_command("serve_llm.cli.convert.command"),
    "front-end": import_command("serve_llm.cli.front_end"),
    "plan": import_command("serve_llm.cli.plan.command"),
    "run-batch": import_command("serve_llm.cli.run_batch"),
    "scale": import_command("serve_llm.cli.scale"),
    "serve": serve,  # as vLLM and Ollama spell it
    "top": import_command("serve_llm.cli.top"),
}


if __name__ == "__main__":
    sys.exit(main())
