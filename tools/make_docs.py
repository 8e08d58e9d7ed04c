"""Writes the generated part of docs/options.md from the fields of `Options`; --check only says whether it is current.

Everything outside the two marker lines is written by hand and left alone.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from serve_llm.engine.fields import option_name
from serve_llm.engine.options import ENVIRONMENT_PREFIX, fields

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
BEGIN, END = "<!-- options: begin (make docs) -->", "<!-- options: end -->"


def table() -> str:
    """One row per option, in the order of --help."""
    rows = ["| Option | Default | Environment | Meaning |", "|---|---|---|---|"]
    for option in fields():
        environment = ENVIRONMENT_PREFIX + option_name(option).replace("-", "_").upper()
        help = str(option.metadata["help"]).replace("|", "\\|")
        rows.append(f"| {_spelling(option)} | {_default(option)} | `{environment}` | {help} |")
    return "\n".join(rows)


def _spelling(option: dataclasses.Field[object]) -> str:
    name = option_name(option)
    if option.name == "model":
        return "`MODEL`"
    if isinstance(option.default, bool):
        return f"`--{name}`, `--no-{name}`"
    short = option.metadata["short"]
    return f"`--{name}`" + (f", `-{short}`" if short else "")


def _default(option: dataclasses.Field[object]) -> str:
    if option.default is dataclasses.MISSING or option.default is None or option.default == ():
        return ""
    return {True: "on", False: "off"}[option.default] if isinstance(option.default, bool) else f"`{option.default}`"


def updated(page: str) -> str:
    """The page with the table between its markers replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = updated(page)
    if sys.argv[1:] == ["--check"]:
        if page != wanted:
            sys.stderr.write("docs/options.md is out of date: run `make docs`\n")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
