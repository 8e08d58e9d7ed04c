"""Report the size of the code: lines per folder and the longest files. Fails if a file is too long.

A file may have at most 400 lines, a model family at most 120. Data tables and schemas may be longer if listed here.
Functions have no limit, since such limits lead to fragmented code.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("serve_llm", "cli", "common", "server", "engine", "kernels", "examples", "tools", "tests")
MAX_FILE = 400
MAX_FAMILY = 120
FAMILIES = "engine/model/families/"
EXEMPT: frozenset[str] = frozenset()  # paths relative to the root


def main() -> int:
    too_long: list[str] = []
    longest_files: list[tuple[int, str]] = []
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        total = 0
        for path in paths:
            name = str(path.relative_to(ROOT))
            lines = len(path.read_text(encoding="utf-8").splitlines())
            total += lines
            longest_files.append((lines, name))
        print(f"{folder:10} {len(paths):4} files {total:6} lines")
    families = [(lines, name) for lines, name in longest_files if name.startswith(FAMILIES)]
    for title, rows, limit in (("file", longest_files, MAX_FILE), ("family file", families, MAX_FAMILY)):
        rows.sort(reverse=True)
        print(f"longest {title}s: " + ", ".join(f"{name} {lines}" for lines, name in rows[:3]))
        too_long += [f"{title} {name}: {n} > {limit} lines" for n, name in rows if n > limit and name not in EXEMPT]
    for line in too_long:
        print(f"too long: {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
