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
from tokenizers import Tokenizer

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
    "slow": "Path(__file__).with_suffix('.began').touch(); time.sleep(99)",
    "waits": """
began = Path(__file__).with_name("slow.began")
while not began.exists():
    time.sleep(0.01)
report.measured("the slow one is running", 1)
""",
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
    assert table.count("FAIL") == 3 and {row["part"] for row in rows} == {*failed, "well"}
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


def test_parts_that_measure_nothing_run_at_the_same_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "AT_ONCE", {"slow", "waits"})
    monkeypatch.setattr(check, "SECONDS", {"slow": 10, "waits": 60, "well": 60})
    code, rows, _ = run("--parts", "slow,waits,well")
    assert [row["part"] for row in rows if row["name"] == "seconds"] == ["slow", "waits", "well"], "in their order"
    assert {row["part"]: row["value"] for row in rows if row.get("passed") is False} == {"slow": "not done after 10 s"}
    assert code == 1 and any(row["name"] == "the slow one is running" for row in rows)


def test_what_comes_back_is_three_files(run: Run, tmp_path: Path) -> None:
    run("--parts", "broken,well")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "result.json", "log.txt"}
    log = (tmp_path / "out" / "log.txt").read_text()
    places = [log.index(words) for words in ("=== broken", "OSError: no such thing", "=== well", "imports come from")]
    assert places == sorted(places)


def test_a_line_that_was_cut_off_and_what_is_no_number(tmp_path: Path) -> None:
    report = module("report")
    written = tmp_path / "part.jsonl"
    report.Report("part", written).measured("ratio", float("nan"))
    with written.open("a") as file:
        file.write('{"part": "part", "na')
    assert report.read_rows(written) == [report.Row("part", "ratio", "nan")]


def test_a_difference_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    kernels, common, report = module("parts.kernels"), module("parts.common"), module("report")
    here = common.Place(report.Report("kernels", tmp_path / "rows"), rehearse=True)
    kernels.tell(here, iter([("norm", 0.0, 1e-2), ("norm", float("nan"), 1e-2), ("rope", 1e-3, 1e-2)]), "all")
    assert {row.name: row.passed for row in report.read_rows(tmp_path / "rows")} == {"norm": False, "rope": True}


def test_every_id_has_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sends no event for one that has none."""
    common = module("parts.common")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = common.Place(None, rehearse=False).folder(common.LLAMA_8B, "8b")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert tokenizer.get_vocab_size() == common.LLAMA_8B["vocab_size"]
    assert tokenizer.decode([4096, 5000, 128255]) == "<4096><5000><128255>"


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
