"""Results of several runs are merged, and the page is written from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.gpu_check import load_module

figures, floors, report, results = (load_module(name) for name in ("figures", "floors", "report", "results"))
Row = report.Row


def attempt(*rows: Any, problem: str = "") -> Any:
    return results.Attempt(1.0, problem, list(rows))


def run(day: int, **parts: Any) -> Any:
    return results.Run(f"2026-01-{day:02}T00:00:00.000+00:00", "NVIDIA H200", "580.159", "check.py", parts)


SPEED = "8B: decode, batch 64"
FIRST = run(
    1,
    kernels=attempt(Row("kernels", "norm", "1e-3", passed=True), Row("kernels", "rope", "9e-1", passed=False)),
    speed=attempt(Row("speed", SPEED, 7.5, "ms"), Row("speed", f"{SPEED}: share of the floor", 0.745, aim=0.7)),
    mixed=attempt(Row("mixed", "decode, equal contexts", 10.0, "ms"), problem="exit code 1"),
)
SECOND = run(
    2,
    speed=attempt(Row("speed", SPEED, 7.1, "ms"), problem="not done after 115 s"),
    kernels=attempt(Row("kernels", "norm", "1e-3", passed=True)),
)


def test_what_is_unfinished() -> None:
    names = ["machine", "kernels", "speed", "mixed"]
    assert results.unfinished(names, results.newest_attempts([FIRST])) == ["machine", "kernels", "mixed"]
    assert results.unfinished(names, results.newest_attempts([FIRST, SECOND])) == ["machine", "speed", "mixed"]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "more" / "results.json"
    assert results.read_runs(path) == []
    results.write_runs(path, [SECOND, FIRST])
    assert results.read_runs(path) == [FIRST, SECOND], "by date"
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_runs_are_merged_by_their_dates() -> None:
    begun = run(2, kernels=SECOND.parts["kernels"])
    assert results.merge_runs([FIRST, begun], [SECOND]) == [FIRST, SECOND]
    assert results.merge_runs([SECOND], [begun, FIRST]) == [FIRST, SECOND], "the state with more parts"


def test_newest_figures() -> None:
    found = {(one.row.part, one.row.name): (one.row.value, one.run) for one in results.newest_figures([FIRST, SECOND])}
    assert found == {
        ("kernels", "norm"): ("1e-3", 2),  # a complete run: the older failure is gone
        ("speed", SPEED): (7.1, 2),
        ("speed", f"{SPEED}: share of the floor"): (0.745, 1),  # the newer attempt ended before it
        ("mixed", "decode, equal contexts"): (10.0, 1),
    }


def test_the_page_says_what_was_seen_and_in_which_run() -> None:
    page = figures.PAGE.read_text()
    renewed = figures.renew(page, [FIRST, SECOND])
    assert "| 8B, batch 64 | 5.59 ms | 7.4-8.0 ms | 0.70 | 7.1 ms (0.745 of the floor) | 2 |" in renewed
    assert "| 8B, batch 1 | 3.52 ms | 4.9-5.3 ms | 0.70 | not run |  |" in renewed
    assert "| 1 | 2026-01-01T00:00:00 | NVIDIA H200 | 580.159 | `check.py` |" in renewed
    assert "1 of 1 checks passed. Parts that failed: speed, mixed." in renewed
    assert "| kernels | rope | FAIL: 9e-1 |  | 1 |" in figures.renew(page, [FIRST])
    assert figures.renew(renewed, results.read_runs(figures.RESULTS)) == page, "nothing outside the markers changes"
    with pytest.raises(ValueError, match="must have these lines once"):
        figures.renew(page.replace(figures.MARKERS["runs"][1], ""), [])


def test_the_page_is_current() -> None:
    """If this fails, run: python tests/gpu/figures.py."""
    assert figures.renew(figures.PAGE.read_text(), results.read_runs(figures.RESULTS)) == figures.PAGE.read_text()


def test_further_results_are_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, kept, further = tmp_path / "gpu.md", tmp_path / "results.json", tmp_path / "further.json"
    page.write_text(figures.PAGE.read_text())
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "RESULTS", kept)
    results.write_runs(kept, [FIRST])
    results.write_runs(further, [SECOND])
    monkeypatch.setattr(sys, "argv", ["figures.py", str(further)])
    assert figures.main() == 0 and results.read_runs(kept) == [FIRST, SECOND]
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0
    page.write_text(page.read_text().replace("7.1 ms", "6.1 ms"))
    assert figures.main() == 1
    results.write_runs(further, [results.Run("2026-01-03", "rehearsal", "none", "check.py", {})])
    monkeypatch.setattr(sys, "argv", ["figures.py", str(further)])
    with pytest.raises(SystemExit):
        figures.main()
    assert len(results.read_runs(kept)) == 2


def test_floors() -> None:
    spec = floors.LLAMA_8B.spec()
    assert floors.floor_seconds(spec, [(1, 1024)]) == pytest.approx(15.14e9 / 4.3e12, rel=2e-3)
    assert floors.floor_seconds(spec, [(8192, 8192)]) == pytest.approx(132e12 / 790e12, rel=2e-2)
    assert floors.floor_seconds(floors.LLAMA_8B.spec("fp8"), [(1, 1024)]) == pytest.approx(8.16e9 / 4.3e12, rel=2e-3)
    prompt = [(8192, 8192)]
    halved = floors.floor_seconds(floors.LLAMA_8B.spec("fp8"), prompt) / floors.floor_seconds(spec, prompt)
    assert 0.5 < halved < 0.6, "but for attention and the head"
    unequal = floors.uneven()
    assert len(unequal) == 64 and sum(unequal) == pytest.approx(sum(floors.even(unequal)), abs=64)
