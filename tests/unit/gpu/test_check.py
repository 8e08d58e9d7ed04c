"""The GPU check's own logic, without its parts: how failing, hanging and unknown parts are handled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.gpu_check import ROOT, load_module

Run = Callable[..., tuple[int, list[dict[str, Any]], str]]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
check, results, wheels = load_module("check"), load_module("results"), load_module("wheels")

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
import serve_llm.common.types as found
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
    """Run the check with parts of these names. Returns exit code, rows, and the printed table."""
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
    monkeypatch.setattr(check, "RESULTS", tmp_path / "results.json")
    nvidia_smi = tmp_path / "bin" / "nvidia-smi"
    nvidia_smi.parent.mkdir()
    nvidia_smi.write_text("#!/bin/sh\necho a card, 580.1\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvidia_smi.parent), prepend=":")
    monkeypatch.setattr(check, "DEVICE", tmp_path)

    def call(*words: str) -> tuple[int, list[dict[str, object]], str]:
        monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path / "out"), *words])
        code = check.main()
        printed = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert printed["command"] == " ".join(["check.py", *words]), "without the folder"
        table = tmp_path / "out" / "table.md"
        return code, printed["rows"], table.read_text() if table.exists() else ""

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


def test_a_part_whose_limit_does_not_fit_is_left_for_the_next_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SECONDS", {"well": 60, "wrong": 600, "broken": 60})
    monkeypatch.setattr(check, "TOTAL_SECONDS", 300)
    _, rows, _ = run()
    assert {row["part"] for row in rows} == {"well", "broken"}
    code, rows, _ = run()
    assert (code, {row["part"] for row in rows}) == (1, {"broken"}), "which failed; the other one does not fit still"
    monkeypatch.setattr(check, "TOTAL_SECONDS", 900)
    _, rows, _ = run()
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["wrong", "broken"], "missing before failed"


def test_a_run_with_nothing_left_does_nothing_and_parts_can_be_named_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SECONDS", {"well": 60})
    assert [row["part"] for row in run()[1]] and run()[1] == []
    assert run("--parts", "well")[1] != []
    found = results.read_runs(tmp_path / "results.json")
    assert {one.card for one in found} == {"a card"} and all(one.driver == "580.1" for one in found)
    assert results.read_runs(tmp_path / "out" / "results.json") == found


def test_another_card_does_all_parts_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SECONDS", {"well": 60})
    assert run()[1] != [] and run()[1] == []
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho another card, 580.1\n")
    assert run()[1] != [] and run()[1] == []
    found = results.read_runs(tmp_path / "results.json")
    assert [one.card for one in found if one.parts] == ["a card", "another card"]


def test_results_are_written_after_each_part(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(left: list[str], seconds: float) -> list[str]:
        if "well" not in left:
            raise KeyboardInterrupt
        return ["well"]

    monkeypatch.setattr(check, "next_parts", stop)
    with pytest.raises(KeyboardInterrupt):
        run("--parts", "well,broken")
    assert [list(one.parts) for one in results.read_runs(tmp_path / "out" / "results.json")] == [["well"]]


def test_a_rehearsal_leaves_the_results_alone(run: Run, tmp_path: Path) -> None:
    run("--rehearse", "--parts", "well")
    assert not (tmp_path / "results.json").exists()
    assert [one.card for one in results.read_runs(tmp_path / "out" / "results.json")] == ["rehearsal"]


def test_an_unknown_part_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--parts", "well,dances")
    assert ended.value.code == 2
    assert "no part is called dances" in capsys.readouterr().err


def test_without_a_gpu_only_a_rehearsal_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "DEVICE", tmp_path / "nvidiactl")
    with pytest.raises(SystemExit) as ended:
        run("--parts", "well")
    assert ended.value.code == 2 and not (tmp_path / "results.json").exists()
    assert "there is no NVIDIA GPU" in capsys.readouterr().err
    assert run("--rehearse", "--parts", "well")[0] == 0


@pytest.mark.slow
def test_parts_that_measure_nothing_run_at_the_same_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "AT_ONCE", {"slow", "waits"})
    monkeypatch.setattr(check, "SECONDS", {"slow": 10, "waits": 60, "well": 60})
    code, rows, _ = run("--parts", "slow,waits,well")
    assert [row["part"] for row in rows if row["name"] == "seconds"] == ["slow", "waits", "well"], "in their order"
    assert {row["part"]: row["value"] for row in rows if row.get("passed") is False} == {"slow": "not done after 10 s"}
    assert code == 1 and any(row["name"] == "the slow one is running" for row in rows)


def test_what_comes_back_is_three_files(run: Run, tmp_path: Path) -> None:
    run("--parts", "broken,well")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "results.json", "log.txt"}
    log = (tmp_path / "out" / "log.txt").read_text()
    places = [log.index(words) for words in ("=== broken", "OSError: no such thing", "=== well", "imports come from")]
    assert places == sorted(places)


def test_a_line_that_was_cut_off_and_what_is_no_number(tmp_path: Path) -> None:
    report = load_module("report")
    written = tmp_path / "part.jsonl"
    report.Report("part", written).measured("ratio", float("nan"))
    with written.open("a") as file:
        file.write('{"part": "part", "na')
    assert report.read_rows(written) == [report.Row("part", "ratio", "nan")]


def test_a_difference_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    kernels, common, report = load_module("parts.kernels"), load_module("parts.common"), load_module("report")
    here = common.Place(report.Report("kernels", tmp_path / "rows"), rehearse=True)
    kernels.tell(here, iter([("norm", 0.0, 1e-2), ("norm", float("nan"), 1e-2), ("rope", 1e-3, 1e-2)]), "all")
    assert {row.name: row.passed for row in report.read_rows(tmp_path / "rows")} == {"norm": False, "rope": True}


def test_every_id_has_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sends no event for an id without text."""
    common, floors = load_module("parts.common"), load_module("floors")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = common.Place(None, rehearse=False).folder(floors.LLAMA_8B)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert tokenizer.get_vocab_size() == floors.LLAMA_8B.config["vocab_size"]
    assert tokenizer.decode([4096, 5000, 128255]) == "<4096><5000><128255>"


def list_limits_of_the_page() -> dict[str, int]:
    """Return each part's limit, as listed in docs/gpu.md."""
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+`) \| ([0-9, ]+) \|", PAGE, re.MULTILINE)
    found = {}
    for parts, limits in rows:
        found |= dict(zip(re.findall(r"\w+", parts), map(int, limits.split(", ")), strict=True))
    return found


def test_the_page_has_the_limits_and_what_they_add_up_to() -> None:
    assert list_limits_of_the_page() == check.SECONDS
    apart = sum(limit for name, limit in check.SECONDS.items() if name not in check.AT_ONCE)
    total = apart + max(check.SECONDS[name] for name in check.AT_ONCE)
    assert f"Together the limits are {total:,} s" in PAGE and f"A run of {check.TOTAL_SECONDS} s" in PAGE


def test_three_runs_are_enough_even_if_every_part_takes_its_limit() -> None:
    left = list(check.SECONDS)
    runs = []
    while left:
        seconds: float = check.TOTAL_SECONDS
        done: list[str] = []
        while now := check.next_parts(left, seconds):
            seconds -= max(check.SECONDS[name] for name in now)
            done += now
            left = [name for name in left if name not in now]
        runs.append(done)
    assert len(runs) == 3 and check.TOTAL_SECONDS <= 475
    first = re.search(r"the first one does at least ([^.]*)\.", PAGE.replace("\n", " "))
    assert first and set(re.findall(r"`(\w+)`", first[1])) == set(list(check.SECONDS)[:9]) <= set(runs[0])


def test_every_part_has_a_limit() -> None:
    programs = {path.stem for path in (ROOT / "tests/gpu/parts").glob("*.py") if 'common.place("' in path.read_text()}
    assert programs == set(check.SECONDS)
    assert all(limit <= 150 for limit in check.SECONDS.values())


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
