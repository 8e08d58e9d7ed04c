"""Input and output of the chat: a terminal with history and colours, or a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"
# A model's text must not move the cursor or change the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_HISTORY = 1000


class ChatDisplay:
    """Writes answers chunk by chunk. Reasoning and notes are shown only on a terminal, dimmed."""

    def __init__(self, output: TextIO, notes: TextIO) -> None:
        """notes: where errors and notes go."""
        self.is_terminal = output.isatty()
        self._output = output
        self._notes = notes
        self._has_colours = self.is_terminal and "NO_COLOR" not in os.environ
        self._kind = ""

    def write(self, kind: str, text: str) -> None:
        """kind: "content", "reasoning" or "call"."""
        if kind == "reasoning" and not self.is_terminal:
            return
        if kind != self._kind and self._kind:
            self._output.write("\n")
        self._kind = kind
        if self.is_terminal:
            text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
        style = {"reasoning": _DIM, "call": _BOLD}.get(kind, "")
        self._output.write(f"{style}{text}{_PLAIN}" if style and self._has_colours else text)
        self._output.flush()

    def end_answer(self) -> None:
        if self._kind:
            self._output.write("\n")
        self._output.flush()
        self._kind = ""

    def note(self, text: str) -> None:
        """Write a line for the user; not written to pipes."""
        if self.is_terminal and text:
            self._output.write(f"{_DIM}{text}{_PLAIN}\n" if self._has_colours else f"{text}\n")
            self._output.flush()

    def error(self, text: str) -> None:
        self._notes.write(f"serve-llm chat: {text}\n")
        self._notes.flush()


def read_terminal_line(prompt: str) -> str:
    """One line; one that ends with a backslash continues on the next. Raises EOFError after Ctrl-D."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def make_pipe_reader(source: TextIO) -> Callable[[str], str]:
    """Reads lines without a prompt. Raises EOFError at the end."""

    def read(prompt: str) -> str:
        line = source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


class LineHistory:
    """The input history for readline, kept in a file of this user. A context manager."""

    def __init__(self, path: Path | None = None) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._path = path or Path(state).expanduser() / "serve-llm" / "chat_history"

    def __enter__(self) -> LineHistory:
        import readline  # changes how `input` reads

        readline.set_history_length(MAX_HISTORY)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        import readline

        with contextlib.suppress(OSError):  # the home directory is not writable
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(self._path)
            self._path.chmod(0o600)


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
