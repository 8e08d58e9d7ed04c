"""Writes the generated parts of docs/options.md, from the fields of `Options` and `Limits`, and of docs/models.md, from
the model families; --check only says whether they are current.

Everything outside the marker lines is written by hand and left alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from serve_llm.engine.fields import option_name
from serve_llm.engine.limits import Limits
from serve_llm.engine.options import ENVIRONMENT_PREFIX, fields

DOCS = Path(__file__).parent.parent / "docs"
OPTIONS_PAGE, MODELS_PAGE = DOCS / "options.md", DOCS / "models.md"
BEGIN, END = "<!-- options: begin (make docs) -->", "<!-- options: end -->"
MODELS = ("<!-- models: begin (make docs) -->", "<!-- models: end -->")
LIMITS = ("<!-- limits: begin (make docs) -->", "<!-- limits: end -->")


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
    if isinstance(option.default, tuple) and option.default:
        return f"`{','.join(map(str, option.default))}`"
    if option.default is dataclasses.MISSING or option.default is None or option.default == ():
        return ""
    return {True: "on", False: "off"}[option.default] if isinstance(option.default, bool) else f"`{option.default}`"


def limits_table() -> str:
    """One row per limit."""
    rows = ["| Limit | Default | Most |", "|---|---|---|"]
    for limit in dataclasses.fields(Limits):
        rows.append(f"| `{limit.name.replace('_', '-')}` | {limit.default:,} | {limit.metadata['help']} |")
    return "\n".join(rows)


def models_table() -> str:
    """One row per model architecture."""
    sys.path.insert(0, str(Path(__file__).parent))
    import models_page  # with it torch and transformers

    return models_page.table()


PAGES: dict[Path, dict[tuple[str, str], Callable[[], str]]] = {
    OPTIONS_PAGE: {(BEGIN, END): table, LIMITS: limits_table},
    MODELS_PAGE: {MODELS: models_table},
}


def updated(page: str, parts: Mapping[tuple[str, str], Callable[[], str]]) -> str:
    """The page with what stands between its markers replaced."""
    for (begin, end), text in parts.items():
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{text()}\n{end}{after}"
    return page


def main() -> int:
    """With --check 1 if a page is out of date, else 0."""
    outdated = 0
    for path, parts in PAGES.items():
        page = path.read_text(encoding="utf-8")
        wanted = updated(page, parts)
        if sys.argv[1:] != ["--check"]:
            path.write_text(wanted, encoding="utf-8")
        elif page != wanted:
            sys.stderr.write(f"docs/{path.name} is out of date: run `make docs`\n")
            outdated = 1
    return outdated


if __name__ == "__main__":
    raise SystemExit(main())
