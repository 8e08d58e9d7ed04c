"""`serve-llm chat [URL|MODEL]`: talk to a model in the terminal, or through a pipe.

A URL names a running server from any vendor; for a model, a server is started, and stopped at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence

from serve_llm.cli.api_client import DEFAULT_URL, ApiClient, ApiError, complete_url, is_url
from serve_llm.cli.chat.display import ChatDisplay, LineHistory, is_interactive, make_pipe_reader, read_terminal_line
from serve_llm.cli.chat.session import ChatSession, CommandError, StreamedCall
from serve_llm.cli.server_process import end_on_signals, find_server, refuse_mistyped, split_target
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import OptionParser

DESCRIPTION = (
    "Talk to a model. Give the URL of a running server (default: "
    + DEFAULT_URL
    + "), or a model, for which a server is "
    "started and stopped at the end; other options are then that server's. Type /help for commands. Without a "
    "terminal, the text of stdin is one message and the answer goes to stdout."
)
INTERRUPTED = 130


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="serve-llm chat",
        usage="serve-llm chat [URL|MODEL] [options] [options of the server]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    # With the names of `vllm chat` in addition to ours.
    parser.add_argument("--url", metavar="URL", help="the same as URL")
    parser.add_argument(
        "-p",
        "--prompt",
        "-q",
        "--quick",
        dest="prompt",
        metavar="TEXT",
        help="send one message, with stdin appended, and end",
    )
    parser.add_argument("--lines", action="store_true", help="without a terminal: treat each line of stdin as typed")
    parser.add_argument("--system", "--system-prompt", dest="system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="field of requests; may be repeated"
    )
    parser.add_argument(
        "--model",
        "--model-name",
        dest="model",
        metavar="NAME",
        help="name of the model at a URL (default: the first one)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: SERVE_LLM_API_KEY)")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    target, rest = split_target(argv)
    parser = create_parser()
    options, server_arguments = parser.parse_known_args(rest)
    refuse_mistyped(parser, server_arguments)
    if options.url is not None:
        if target != DEFAULT_URL:
            raise OptionError("--url: the server is given twice")
        target = complete_url(options.url)
        if not is_url(target):
            raise OptionError(f"--url: expected http://HOST:PORT, not {target!r}")
    # The environment may hold several keys; one is enough.
    api_key = options.api_key or environ.get("SERVE_LLM_API_KEY", "").split(",")[0] or None
    display = ChatDisplay(sys.stdout, sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_signals())
        try:
            if not is_url(target):
                display.note(f"starting {target} ...")
            url = stack.enter_context(find_server(target, server_arguments, options.api_key))
            client = ApiClient(url, api_key)
            session = ChatSession(options.model or client.find_model(), options.system)
            for text in options.set:
                name, _, value = text.partition("=")
                session.set_field(name, value)
            return talk(ChatLoop(client, session, display), options.prompt, options.lines)
        except CommandError as error:
            raise OptionError(f"--set: {error}") from None
        except KeyboardInterrupt:
            return INTERRUPTED


def talk(chat: ChatLoop, prompt: str | None, by_line: bool) -> int:
    """Returns the exit code."""
    if prompt is None and is_interactive():
        chat.display.note(f"{chat.session.model} at {chat.client.url}; /help for commands, Ctrl-D ends")
        with LineHistory():
            chat.run(read_terminal_line, keeps_going=True)
        return 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    read = make_pipe_reader(sys.stdin)
    if by_line and prompt is None:
        return 0 if chat.run(read, keeps_going=False) else 1
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    message = "\n\n".join(part for part in (prompt, piped) if part)
    if not message:
        raise OptionError("no message: give --prompt TEXT, or text in stdin")
    chat.session.add_user_message(message)
    return 0 if chat.answer(read) else 1


class ChatLoop:
    """Reads lines, runs commands and shows answers."""

    def __init__(self, client: ApiClient, session: ChatSession, display: ChatDisplay) -> None:
        self.client = client
        self.session = session
        self.display = display

    def run(self, read: Callable[[str], str], keeps_going: bool) -> bool:
        """Run until /quit or the end of the input. keeps_going: continue after errors. Returns False if an error ended
        it."""
        while not self.session.is_over:
            try:
                line = read("> ")
            except EOFError:
                break
            except KeyboardInterrupt:
                self.display.note("Ctrl-D or /quit ends")
                continue
            if not self._handle(line, read) and not keeps_going:
                return False
        return True

    def _handle(self, line: str, read: Callable[[str], str]) -> bool:
        """Returns False after an error."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.session.add_user_message(line)
            return self.answer(read)
        try:
            self.display.note(self.session.run_command(line))
        except CommandError as error:
            self.display.error(str(error))
            return False
        if self.session.must_answer:
            self.session.must_answer = False
            return self.answer(read)
        return True

    def answer(self, read: Callable[[str], str]) -> bool:
        """Show the next answer and ask for results of tool calls. Returns False after an error."""
        while True:
            try:
                calls = self._stream_answer()
            except ApiError as error:
                self.display.end_answer()
                self.display.error(str(error))
                self.session.drop_unanswered()
                return False
            if not calls or not self._read_results(calls, read):
                return True

    def _stream_answer(self) -> list[StreamedCall]:
        """Returns the calls of the answer. Raises ApiError."""
        content = ""
        reasoning = ""
        calls: dict[int, StreamedCall] = {}
        events = self.client.stream("/v1/chat/completions", self.session.build_body())
        try:
            for event in events:
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if piece := delta.get("reasoning") or delta.get("reasoning_content"):
                        reasoning += piece
                        self.display.write("reasoning", piece)
                    if piece := delta.get("content"):
                        content += piece
                        self.display.write("content", piece)
                    for part in delta.get("tool_calls") or ():
                        calls[part["index"]] = _extend(calls.get(part["index"]), part)
        except KeyboardInterrupt:
            events.close()  # the server ends the request
            calls.clear()
            self.display.write("content", " ...")
        for call in calls.values():
            self.display.write("call", f"{call.name}({call.arguments})")
            self.display.end_answer()
        self.display.end_answer()
        self.session.add_answer(content, reasoning, list(calls.values()))
        return list(calls.values())

    def _read_results(self, calls: list[StreamedCall], read: Callable[[str], str]) -> bool:
        """Ask for the result of each call. Returns False if the input ended."""
        try:
            results = [read(f"result of {call.name}> ") for call in calls]
        except (EOFError, KeyboardInterrupt):
            self.session.drop_unanswered()
            return False
        for call, result in zip(calls, results, strict=True):
            self.session.add_tool_result(call, result)
        return True


def _extend(call: StreamedCall | None, part: Mapping[str, object]) -> StreamedCall:
    """A call extended by one more chunk."""
    function = part.get("function") or {}
    assert isinstance(function, Mapping)
    call = call or StreamedCall(str(part.get("id") or ""), "", "")
    name = call.name + (function.get("name") or "")
    return call._replace(name=name, arguments=call.arguments + (function.get("arguments") or ""))
