"""A server that a command starts on a free port of this host and stops at the end."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import difflib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from serve_llm.cli.api_client import DEFAULT_URL, complete_url, is_url
from serve_llm.common.errors import OptionError, ServeError
from serve_llm.common.options.peer_flags import find_peer_flag
from serve_llm.common.options.sources import make_parser, parse_args

STOP_SECONDS = 15.0
# Log lines that a waiting user wants to see, without time and source. stderr is a pipe, so the server draws no bars.
_NEWS = re.compile(
    r"(?:INFO [^\[]*\[\S+\] (?:rank \d+: )?(?=Looking for|Downloading|Loading weights|Weights loaded)"
    r"|WARNING [^\[]*\[\S+\] )(.*)"
)
# These come last on its command line: the server's address is read from its log.
_OWN_OPTIONS = ("--host", "127.0.0.1", "--port", "0", "--log-level", "info", "--log-format", "text")
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """`serve-llm MODEL [options]` as a child process. A context manager: entering it waits until requests are served.

    It has its own session, so that Ctrl-C in the terminal does not reach it, and ends with this process. If stderr is a
    terminal, it shows what the server is doing until it serves.
    """

    def __init__(self, arguments: Sequence[str], api_key: str | None = None) -> None:
        """arguments: the server's model and options. Raises OptionError if they cannot work."""
        parse_args(arguments, os.environ)
        self.url = ""
        self.start_seconds = 0.0
        self._command = [sys.executable, "-P", "-m", "serve_llm.cli.main", *arguments, *_OWN_OPTIONS]
        self._environ = os.environ | ({"SERVE_LLM_API_KEY": api_key} if api_key else {})
        self._last_lines: collections.deque[str] = collections.deque(maxlen=20)
        self._has_settled = threading.Event()  # the server serves, or has ended

    def __enter__(self) -> ServerProcess:
        """Raises ServeError with the server's own error and exit code."""
        began = time.perf_counter()
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self._environ,
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self._has_settled.wait()
            if not self.url:
                raise self._explain_end()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(STOP_SECONDS)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                self._last_lines.append(line.rstrip())
                if not self.url and sys.stderr.isatty() and (news := _find_news(line)):
                    sys.stderr.write(f"{news}\n")
                if not self.url and (found := re.search(r" Serving .* on (https?://\S+) after ", line)):
                    self.url = found[1]
                    self._has_settled.set()
        self._has_settled.set()

    def _explain_end(self) -> ServeError:
        code = self._process.wait()
        final = [line.removeprefix("serve-llm: ") for line in self._last_lines if line.startswith("serve-llm: ")]
        error = ServeError(final[-1] if final else "\n".join(["the server ended while starting:", *self._last_lines]))
        error.exit_code = code if code > 0 else 1
        return error


def _find_news(line: str) -> str:
    """The text of a log line, if a waiting user should see it."""
    found = _NEWS.match(line)
    return "" if found is None else found[1]


def split_target(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the URL or model, which comes first, and the other arguments."""
    if argv and not argv[0].startswith("-"):
        return complete_url(argv[0]), list(argv[1:])
    return DEFAULT_URL, list(argv)


def refuse_mistyped(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Raise OptionError for an argument that looks like a mistyped option of the command, not like one of the server.

    parser: the command's. arguments: those that it did not recognise."""
    own = parser._option_string_actions
    known = own | make_parser()._option_string_actions
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in known or find_peer_flag(name) is not None:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        if close and close[0] in own:
            raise OptionError(f"unknown option {name}; did you mean {close[0]}?")


@contextlib.contextmanager
def find_server(target: str, arguments: Sequence[str], api_key: str | None) -> Iterator[str]:
    """Yield the URL of the server at `target`, or of a server started for the model `target` with `arguments`.

    Raises OptionError for arguments in addition to a URL, ServeError if the server does not start.
    """
    if not is_url(target):
        with ServerProcess([target, *arguments], api_key) as server:
            yield server.url
        return
    if arguments:
        name = arguments[0].partition("=")[0]
        found = find_peer_flag(name)
        if found is not None and not found.flag.is_accepted:
            raise found.refuse(name)
        if name in ("--host", "--port"):
            raise OptionError(f"unknown option {name}; give the server's URL first, as http://HOST:PORT")
        raise OptionError(
            f"unknown option {arguments[0]}; if it is one of a server: the one at {target} is running already, "
            "give a MODEL to start another"
        )
    yield target


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise an exception in the block, so that a server started in it is stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
