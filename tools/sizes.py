"""Report the size of the code: lines per folder, the longest files and functions. Fails past the house's limits.

A file has at most 400 lines, one of a model family at most 120, and a function at most 60; data tables and schemas may
be longer if they are listed here.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("serve_llm", "server", "engine", "kernels", "examples", "tools", "tests")
MAX_FILE, MAX_FAMILY, MAX_FUNCTION = 400, 120, 60
FAMILIES = "engine/model/families/"
EXEMPT: frozenset[str] = frozenset()  # paths from the root


def functions(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in found]


def main() -> int:
    too_long, longest_files, longest_functions = [], [], []
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        total = 0
        for path in paths:
            name = str(path.relative_to(ROOT))
            lines = len(path.read_text(encoding="utf-8").splitlines())
            total += lines
            longest_files.append((lines, name))
            longest_functions += [(length, f"{name}:{function}") for length, function in functions(path)]
        print(f"{folder:10} {len(paths):4} files {total:6} lines")
    families = [(lines, name) for lines, name in longest_files if name.startswith(FAMILIES)]
    for title, rows, limit in (
        ("file", longest_files, MAX_FILE),
        ("family file", families, MAX_FAMILY),
        ("function", longest_functions, MAX_FUNCTION),
    ):
        rows.sort(reverse=True)
        print(f"longest {title}s: " + ", ".join(f"{name} {lines}" for lines, name in rows[:3]))
        too_long += [f"{title} {name}: {n} > {limit} lines" for n, name in rows if n > limit and name not in EXEMPT]
    for line in too_long:
        print(f"too long: {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
