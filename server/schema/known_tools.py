"""Anthropic's tools that the client runs: requests name them by type, without the schema of their arguments.

Anthropic's models know these arguments; any other model has to be told. The names of the arguments are those of
Anthropic's documentation, so that programs written for these tools can run the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_Properties = dict[str, dict[str, object]]  # JSON schemas, by argument

_TEXT = {"type": "string"}
_LINES: dict[str, object] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "With view: the first and the last line to show, counted from 1. A last line of -1 is the end.",
}
_INSERT_LINE: dict[str, object] = {
    "type": "integer",
    "description": "With insert: the line after which to insert; 0 is the beginning.",
}
_EDITING: _Properties = {
    "view_range": _LINES,
    "file_text": {**_TEXT, "description": "With create: the content of the file."},
    "old_str": {**_TEXT, "description": "With str_replace: the text to replace, which must occur exactly once."},
    "insert_line": _INSERT_LINE,
}
_INSERT_TEXT: _Properties = {"insert_text": {**_TEXT, "description": "With insert: the text to insert."}}
_NEW_TEXT: _Properties = {"new_str": {**_TEXT, "description": "With str_replace: the text that takes its place."}}
_NEW_OR_INSERTED: _Properties = {"new_str": {**_TEXT, "description": "With str_replace and insert: the new text."}}


class KnownTool(NamedTuple):
    name: str  # unless the request has another one
    description: str
    schema: dict[str, object]  # JSON schema of the arguments


def _build_schema(commands: Sequence[str], properties: _Properties, required: Sequence[str]) -> dict[str, object]:
    command: dict[str, object] = {"type": "string", "enum": list(commands)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": list(required)}


def _build_editor(name: str, inserted: _Properties, *more_commands: str) -> KnownTool:
    path: dict[str, object] = {**_TEXT, "description": "The absolute path of a file, or with view also of a directory."}
    schema = _build_schema(
        ("view", "create", "str_replace", "insert", *more_commands),
        {"path": path, **_EDITING, **inserted},
        ("command", "path"),
    )
    return KnownTool(name, "View, create and edit text files.", schema)


_BASH = KnownTool(
    "bash",
    "Run a command in a bash session that persists between calls. Returns what it prints.",
    {
        "type": "object",
        "properties": {
            "command": {**_TEXT, "description": "The command. Required unless restart is true."},
            "restart": {"type": "boolean", "description": "True starts a new session instead."},
        },
    },
)
_MEMORY = KnownTool(
    "memory",
    "Read and write files in the directory /memories, which persists between conversations. View the directory before "
    "you begin a task, and write down what should be known later.",
    _build_schema(
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        {
            "path": {**_TEXT, "description": "A path below /memories; with every command but rename."},
            **_EDITING,
            **_NEW_TEXT,
            **_INSERT_TEXT,
            "old_path": {**_TEXT, "description": "With rename: the present path."},
            "new_path": {**_TEXT, "description": "With rename: the new path."},
        },
        ("command",),
    ),
)
_FIRST_EDITOR = _build_editor("str_replace_editor", _NEW_OR_INSERTED, "undo_edit")

KNOWN_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _FIRST_EDITOR,
    "text_editor_20250124": _FIRST_EDITOR,
    "text_editor_20250429": _build_editor("str_replace_based_edit_tool", _NEW_OR_INSERTED),
    "text_editor_20250728": _build_editor("str_replace_based_edit_tool", _NEW_TEXT | _INSERT_TEXT),
    "memory_20250818": _MEMORY,
}
