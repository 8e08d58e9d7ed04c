"""Generate tables in the docs: docs/options.md from `Options` and `Limits`, docs/models.md from the model families,
docs/from-*.md from the tables that translate other engines' options, and docs/features.md from the tests' markers.

Only text between the marker lines is replaced. With --check, only report whether the pages are up to date.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from serve_llm.common.options.fields import is_switch, option_name
from serve_llm.common.options.limits import Limits
from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.common.options.sources import ENVIRONMENT_PREFIX

DOCS = Path(__file__).parent.parent / "docs"
OPTIONS_PAGE = DOCS / "options.md"
MODELS_PAGE = DOCS / "models.md"
FEATURES_PAGE = DOCS / "features.md"
# Page -> its tables; see `peers_page.table`.
PEER_PAGES = {
    "from-vllm.md": ("vLLM",),
    "from-sglang.md": ("SGLang",),
    "from-llama-cpp.md": ("llama.cpp",),
    "from-ollama.md": ("commands", "Ollama"),
    "from-other-engines.md": ("variables", "fields", "metrics"),
}
OPTIONS = ("<!-- options: begin (make docs) -->", "<!-- options: end -->")
MODELS = ("<!-- models: begin (make docs) -->", "<!-- models: end -->")
MATRIX = ("<!-- matrix: begin (make docs) -->", "<!-- matrix: end -->")
EVIDENCE = ("<!-- evidence: begin (make docs) -->", "<!-- evidence: end -->")
LIMITS = ("<!-- limits: begin (make docs) -->", "<!-- limits: end -->")


def options_table() -> str:
    """One row per option, in the order of --help."""
    rows = ["| Option | Default | Environment | Meaning |", "|---|---|---|---|"]
    for option in OPTION_FIELDS:
        environment = ENVIRONMENT_PREFIX + option_name(option).replace("-", "_").upper()
        help = str(option.metadata["help"]).replace("|", "\\|")
        rows.append(f"| {_spelling(option)} | {_default(option)} | `{environment}` | {help} |")
    return "\n".join(rows)


def _spelling(option: dataclasses.Field[object]) -> str:
    name = option_name(option)
    if option.name == "model":
        return "`MODEL`"
    if is_switch(option):
        return f"`--{name}`, `--no-{name}`"
    second = option.metadata["alias"] and f"--{option.metadata['alias']}"
    second = second or (option.metadata["short"] and f"-{option.metadata['short']}")
    return f"`--{name}`" + (f", `{second}`" if second else "")


def _default(option: dataclasses.Field[object]) -> str:
    if isinstance(option.default, tuple) and option.default:
        return f"`{','.join(map(str, option.default))}`"
    if option.default is dataclasses.MISSING or option.default is None or option.default == ():
        return ""
    return {True: "on", False: "off"}[option.default] if isinstance(option.default, bool) else f"`{option.default}`"


def limits_table() -> str:
    """One row per limit."""
    rows = ["| Limit | Default | What it limits |", "|---|---|---|"]
    for limit in dataclasses.fields(Limits):
        default = limit.default if isinstance(limit.default, str) else f"{limit.default:,}"
        rows.append(f"| `{limit.name.replace('_', '-')}` | {default} | {limit.metadata['help']} |")
    return "\n".join(rows)


def models_table() -> str:
    """One row per model architecture."""
    sys.path.insert(0, str(Path(__file__).parent))
    import models_page  # imports torch and transformers

    return models_page.table()


def peers_table(kind: str) -> str:
    """Render one table of docs/from-*.md."""
    sys.path.insert(0, str(Path(__file__).parent))
    import peers_page

    return peers_page.table(kind)


def features_table(kind: str) -> str:
    """Render one part of docs/features.md."""
    sys.path.insert(0, str(Path(__file__).parent))
    import features_page

    return features_page.make_matrix() if kind == "matrix" else features_page.make_evidence()


PAGES: dict[Path, dict[tuple[str, str], Callable[[], str]]] = {
    OPTIONS_PAGE: {OPTIONS: options_table, LIMITS: limits_table},
    MODELS_PAGE: {MODELS: models_table},
    FEATURES_PAGE: {
        MATRIX: functools.partial(features_table, "matrix"),
        EVIDENCE: functools.partial(features_table, "evidence"),
    },
    **{
        DOCS / name: {
            (f"<!-- {kind}: begin (make docs) -->", f"<!-- {kind}: end -->"): functools.partial(peers_table, kind)
            for kind in kinds
        }
        for name, kinds in PEER_PAGES.items()
    },
}


def update_page(page: str, parts: Mapping[tuple[str, str], Callable[[], str]]) -> str:
    """Return the page with the text between its markers replaced."""
    for (begin, end), text in parts.items():
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{text()}\n{end}{after}"
    return page


def main() -> int:
    """Return 1 if --check finds an outdated page, else 0."""
    outdated = 0
    for path, parts in PAGES.items():
        page = path.read_text(encoding="utf-8")
        current = update_page(page, parts)
        if sys.argv[1:] != ["--check"]:
            path.write_text(current, encoding="utf-8")
        elif page != current:
            sys.stderr.write(f"docs/{path.name} is out of date: run `make docs`\n")
            outdated = 1
    return outdated


if __name__ == "__main__":
    raise SystemExit(main())
