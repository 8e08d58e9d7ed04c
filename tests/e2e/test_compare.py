"""The benchmark tools as a whole, on two daemons with the demo model."""

from __future__ import annotations

import json

import psutil
import pytest

from bench import compare
from support.daemon import SERVE_LLM


@pytest.mark.slow
def test_two_daemons_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    other = f"other={SERVE_LLM} {{model}} --port {{port}} --max-num-seqs 4"
    arguments = ["serve-llm", other, "--model", "demo", "--workloads", "tiny", "--turns", "2", "--ids", "300:4000"]
    assert compare.main(arguments) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    for name in ("serve-llm", "other"):
        assert [turn["output_tokens"] for turn in found["results"]["tiny"][name]] == [32, 32]
        facts = found["starts"][name]
        assert 0.5 < facts["start_seconds"][0] < 300 and facts["resident_mb"][0] > 100 and facts["idle_cores"][0] < 0.5
    assert any(line.startswith("other") for line in lines)
    assert any("serve-llm to other, the best of the others" in line for line in lines)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
