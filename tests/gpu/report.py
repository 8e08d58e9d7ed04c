"""Rows of the GPU check: parts write one JSON object per line, from which a table is made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    part: str
    name: str
    value: object  # a number, or text
    unit: str = ""
    aim: float | None = None
    passed: bool | None = None  # whether a check was within its limit; None: a measurement

    def plain(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


class Report:
    """Writes a part's rows, each as soon as it is known."""

    def __init__(self, part: str, path: Path) -> None:
        self._part, self._path = part, path
        path.unlink(missing_ok=True)

    def check(self, name: str, passed: bool, value: object = "") -> None:
        self._add(Row(self._part, name, value if value != "" else ("ok" if passed else "failed"), passed=passed))

    def measured(self, name: str, value: float | str, unit: str = "", aim: float | None = None) -> None:
        if isinstance(value, float):
            value = round(value, 4) if math.isfinite(value) else str(value)  # JSON cannot represent such numbers
        self._add(Row(self._part, name, value, unit, aim))

    def not_run(self, name: str, why: str) -> None:
        self._add(Row(self._part, name, f"not run: {why}"))

    def _add(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(row.plain(), flush=True)


def read_rows(path: Path) -> list[Row]:
    """Read the rows. The last line may be incomplete, if the part was killed while writing it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def table(rows: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| part | what | value | aim | |", "|---|---|---|---|---|"]
    words = {True: "pass", False: "FAIL", None: ""}
    for row in rows:
        value = f"{row.value:,.4g}" if isinstance(row.value, float) else str(row.value)
        aim = "" if row.aim is None else f"{row.aim:g}"
        lines.append(f"| {row.part} | {row.name} | {value} {row.unit} | {aim} | {words[row.passed]} |")
    return "\n".join(lines)
