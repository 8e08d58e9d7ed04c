"""A conversation with a model: its messages, the settings of requests, and the commands that change them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HELP = """\
/system TEXT       set the system message; without TEXT remove it
/set NAME VALUE    set a field of requests, such as temperature 0.7, max_tokens 200 or reasoning_effort low
/set               show the fields that are set
/unset NAME        remove one
/tools FILE        offer the tools of a JSON file; without FILE none
/retry             answer the last message anew
/reset             forget the conversation, but not the system message
/save FILE         write the conversation and the fields as JSON
/load FILE         read them again
/quit              end, as Ctrl-D does
A line that ends with \\ continues on the next one. Ctrl-C stops an answer."""


class CommandError(Exception):
    """A command that cannot be run; the message says why."""


class StreamedCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON


class ChatSession:
    """The state of one conversation. Does no I/O except in /save, /load and /tools."""

    def __init__(self, model: str, system: str = "", fields: dict[str, Any] | None = None) -> None:
        self.model = model
        self.system = system
        self.fields: dict[str, Any] = dict(fields or {})
        self.messages: list[dict[str, Any]] = []
        self.must_answer = False  # set by /retry: the last message has no answer
        self.is_over = False
        self._commands: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "system": self._set_system,
            "set": self._set,
            "unset": self._unset,
            "tools": self._set_tools,
            "retry": self._retry,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
            "quit": self._quit,
            "exit": self._quit,
        }

    def build_body(self) -> dict[str, Any]:
        """The body of the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": system + self.messages, "stream": True} | self.fields

    def add_user_message(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_answer(self, content: str, reasoning: str, calls: list[StreamedCall]) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        self.messages.append(message)

    def add_tool_result(self, call: StreamedCall, result: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def drop_unanswered(self) -> None:
        """Forget what follows the last answer, after a failed request."""
        while self.messages and self.messages[-1]["role"] in ("user", "tool"):
            self.messages.pop()
        if self.messages and self.messages[-1].get("tool_calls"):
            self.messages.pop()  # templates refuse calls without results
            self.drop_unanswered()

    def run_command(self, line: str) -> str:
        """Run a line that begins with `/`. Returns what to show. Raises CommandError."""
        name, _, argument = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise CommandError(f"there is no command /{name}; see /help")
        return command(argument.strip())

    def set_field(self, name: str, text: str) -> None:
        """text: JSON, or otherwise a plain string. Raises CommandError."""
        if name in ("messages", "stream", "model"):
            raise CommandError(f"{name} is set by the chat itself")
        try:
            self.fields[name] = json.loads(text)
        except ValueError:
            self.fields[name] = text

    def _set(self, argument: str) -> str:
        if not argument:
            return "\n".join(f"{name} {json.dumps(value)}" for name, value in self.fields.items()) or "nothing is set"
        name, _, value = argument.partition(" ")
        if not value:
            raise CommandError("expected /set NAME VALUE")
        self.set_field(name, value.strip())
        return ""

    def _unset(self, argument: str) -> str:
        if argument not in self.fields:
            raise CommandError(f"{argument or 'no field'} is not set")
        del self.fields[argument]
        return ""

    def _set_system(self, argument: str) -> str:
        self.system = argument
        return ""

    def _set_tools(self, argument: str) -> str:
        if not argument:
            self.fields.pop("tools", None)
            return ""
        tools = read_json(argument)
        if not isinstance(tools, list):
            raise CommandError(f"{argument}: expected a list of tools, as in the field `tools`")
        self.fields["tools"] = tools
        return ""

    def _retry(self, _: str) -> str:
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if not self.messages:
            raise CommandError("there is no message to answer")
        self.must_answer = True
        return ""

    def _reset(self, _: str) -> str:
        self.messages.clear()
        return ""

    def _save(self, argument: str) -> str:
        if not argument:
            raise CommandError("expected /save FILE")
        state = {"model": self.model, "system": self.system, "fields": self.fields, "messages": self.messages}
        try:
            Path(argument).expanduser().write_text(json.dumps(state, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"{argument}: {error.strerror}") from None
        return f"saved {len(self.messages)} messages to {argument}"

    def _load(self, argument: str) -> str:
        state = read_json(argument) if argument else None
        messages = state.get("messages") if isinstance(state, dict) else None
        fields = state.get("fields", {}) if isinstance(state, dict) else None
        is_valid = isinstance(messages, list) and all(isinstance(item, dict) and "role" in item for item in messages)
        if not isinstance(state, dict) or not is_valid or not isinstance(fields, dict):
            raise CommandError(f"expected /load FILE with a file that /save has written, not {argument!r}")
        self.messages = list(messages or [])
        self.fields = fields
        self.system = str(state.get("system", ""))
        return f"loaded {len(self.messages)} messages"

    def _quit(self, _: str) -> str:
        self.is_over = True
        return ""


def read_json(path: str) -> Any:
    """Raises CommandError."""
    try:
        return json.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise CommandError(f"{os.path.basename(path)} is not JSON") from None
