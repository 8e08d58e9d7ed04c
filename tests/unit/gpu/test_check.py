"""The GPU check's own logic, without its parts: what becomes of those that fail, hang or are unknown."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


def module(name: str) -> Any:
    """Of tests/gpu, which is on the path of its own programs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "gpu")
        return importlib.import_module(name)


check, wheels = module("check"), module("wheels")

PART = """
import sys, time
from pathlib import Path
from report import Report
report = Report("{name}", Path(sys.argv[1]))
report.measured("speed", 12.34567, "m/s", aim=10)
report.not_run("the rest", "no cards")
{then}
"""
IMPORTS = """
import serve_llm.engine.types as found
report.check("imports come from the tree", Path(found.__file__).resolve().is_relative_to({root!r}))
"""
THEN = {
    "well": IMPORTS.format(root=str(ROOT)),
    "wrong": "report.check('sums', False)",
    "broken": "raise OSError('no such thing')",
    "slow": "time.sleep(99)",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The check with parts of these names: exit code, rows, the printed table."""
    parts = tmp_path / "more" / "parts"
    parts.mkdir(parents=True)
    (parts / "__init__.py").touch()
    for name, then in THEN.items():
        (parts / f"{name}.py").write_text(PART.format(name=name, then=then))
    environment = check.environment

    def with_ours(folder: Path) -> dict[str, str]:
        found = environment(folder)
        return found | {"PYTHONPATH": f"{parts.parent}:{found['PYTHONPATH']}"}

    monkeypatch.setattr(check, "environment", with_ours)
    monkeypatch.setattr(check, "SECONDS", {"well": 60, "wrong": 60, "broken": 60, "slow": 4})

    def call(*words: str) -> tuple[int, list[dict[str, object]], str]:
        monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path / "out"), *words])
        code = check.main()
        printed = capsys.readouterr().out
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        assert printed.splitlines()[-1] == json.dumps(result)
        return code, result["rows"], (tmp_path / "out" / "table.md").read_text()

    return call


def test_a_part_that_passes(run: Run) -> None:
    code, rows, table = run("--parts", "well")
    assert code == 0 and [row["name"] for row in rows[:3]] == ["speed", "the rest", "imports come from the tree"]
    assert "passed" not in rows[0] and rows[2]["passed"] is True
    assert "| well | speed | 12.35 m/s | 10 |  |" in table and "| well | the rest | not run: no cards  |  |  |" in table
    assert table.splitlines()[0] == "| part | what | value | aim | |"


def test_a_failing_check_a_broken_part_and_one_without_end_are_rows_and_let_others_run(run: Run) -> None:
    code, rows, table = run("--parts", "slow,broken,wrong,well")
    assert code == 1
    failed = {row["part"]: row["value"] for row in rows if row.get("passed") is False}
    assert failed == {"wrong": "failed", "broken": "exit code 1", "slow": "not done after 4 s"}
    assert table.count("FAIL") == 3 and {row["part"] for row in rows} == set(THEN)
    assert sum(row["name"] == "speed" for row in rows) == 4, "what a part wrote before it failed is kept"


def test_without_time_left_parts_are_said_not_to_have_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TOTAL_SECONDS", 0)
    code, rows, _ = run("--parts", "well")
    assert code == 1 and rows[0]["value"] == "not run: no time was left"


def test_an_unknown_part_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--parts", "well,dances")
    assert ended.value.code == 2
    assert "no part is called dances" in capsys.readouterr().err


def test_parts_exist_and_fit_into_the_time() -> None:
    for name in check.SECONDS:
        assert (ROOT / "tests" / "gpu" / "parts" / f"{name}.py").is_file()
    assert check.TOTAL_SECONDS < 480 and all(limit <= 150 for limit in check.SECONDS.values())


def test_the_tree_travels() -> None:
    assert wheels.MOST_BYTES == 60 << 20
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    brought = sum(path.stat().st_size for path in (ROOT / ".whl").glob("*.whl"))
    assert wheels.tree_bytes(ROOT) + brought < wheels.MOST_BYTES


def test_it_says_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests" / "gpu" / "check.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "less than eight minutes" in done.stdout


def test_idle_is_what_no_kernel_covers() -> None:
    idle = module("parts.idle")
    spans = [(0.0, 10.0), (5.0, 20.0), (30.0, 40.0), (30.0, 35.0), (50.0, 100.0)]
    assert idle.busy(spans, 0.0, 100.0) == 80.0 and idle.busy(spans, 15.0, 45.0) == 15.0
    assert idle.idle_share(reversed(spans)) == pytest.approx(20 / 80), "a tenth at either end does not count"
    assert idle.idle_share([(0.0, 1.0), (1.0, 2.0)]) == 0.0
