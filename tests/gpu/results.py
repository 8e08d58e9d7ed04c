"""Results of the GPU check over several runs: a JSON file to which every run adds, so that the next one knows what
is missing. The latest attempt at a part decides whether it is done; its figures stay until a later attempt replaces
them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from report import Row


@dataclass(frozen=True)
class Attempt:
    """One part in one run."""

    seconds: float
    problem: str  # why the part ended early; empty if it did not
    rows: list[Row]

    @property
    def is_done(self) -> bool:
        """Whether it ran to its end and all its checks passed."""
        return not self.problem and all(row.passed is not False for row in self.rows)


@dataclass
class Run:
    """One call of check.py. Two runs with equal dates are the same run."""

    date: str  # UTC, ISO 8601, to the millisecond
    card: str
    driver: str
    command: str
    parts: dict[str, Attempt] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for attempt in self.parts.values() for row in attempt.rows]


@dataclass(frozen=True)
class Figure:
    """A row, and the number of the run that produced it, counted from 1."""

    row: Row
    run: int


def read_runs(path: Path) -> list[Run]:
    """Read the runs, by date. Empty if there is no file."""
    if not path.exists():
        return []
    runs = []
    for plain in json.loads(path.read_text())["runs"]:
        parts = {
            name: Attempt(part["seconds"], part["problem"], [Row(**row) for row in part["rows"]])
            for name, part in plain.pop("parts").items()
        }
        runs.append(Run(**plain, parts=parts))
    return sorted(runs, key=lambda run: run.date)


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    plain = [asdict(run) for run in runs]
    for run in plain:
        for part in run["parts"].values():
            part["rows"] = [Row(**row).plain() for row in part["rows"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"runs": plain}, indent=1) + "\n")
    os.replace(partial, path)


def merge_runs(*several: Iterable[Run]) -> list[Run]:
    """Merge runs, by date. Of two states of the same run, the one with more parts is kept."""
    found: dict[str, Run] = {}
    for runs in several:
        for run in runs:
            known = found.get(run.date)
            if known is None or len(run.parts) >= len(known.parts):
                found[run.date] = run
    return [found[date] for date in sorted(found)]


def newest_attempts(runs: Iterable[Run]) -> dict[str, Attempt]:
    """Return the latest attempt at each part. runs: by date."""
    found: dict[str, Attempt] = {}
    for run in runs:
        found |= run.parts
    return found


def unfinished(names: Iterable[str], attempts: Mapping[str, Attempt]) -> list[str]:
    """Return the parts that never ran, then those whose latest attempt failed; each in the given order."""
    missing, failed = [], []
    for name in names:
        if name not in attempts:
            missing.append(name)
        elif not attempts[name].is_done:
            failed.append(name)
    return missing + failed


def newest_figures(runs: Iterable[Run]) -> list[Figure]:
    """Return the latest rows of each part. An attempt that ran to its end replaces all older rows of the part; one that
    ended early replaces only the rows that it also has."""
    found: dict[str, dict[str, Figure]] = {}
    for number, run in enumerate(runs, 1):
        for part, attempt in run.parts.items():
            figures = {row.name: Figure(row, number) for row in attempt.rows}
            found[part] = found.get(part, {}) | figures if attempt.problem else figures
    return [figure for figures in found.values() for figure in figures.values()]
