"""An engine of 1,024 ranks on 128 hosts, up to its limits: the ranks are fake, everything on the engine's side is real.

`bench.many_ranks` measures the same.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
from pathlib import Path

import pytest

from serve_llm.common.errors import CapacityError, HostLost
from serve_llm.common.open_files import raise_limit
from support.fake_engine import NUM_SEQUENCES, FakeRanksEngine

NODES = 128
RANKS_PER_NODE = 8


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_an_engine_of_1024_ranks_starts_steps_notices_a_loss_and_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4 * NODES * RANKS_PER_NODE + 256:
        pytest.skip("needs more open files than this system allows (ulimit -Hn)")
    raise_limit()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = count_open_files()
    with FakeRanksEngine(NODES, RANKS_PER_NODE) as engine:
        assert engine.size == 1024
        for _ in range(3):
            assert engine.step() == list(range(NUM_SEQUENCES))
        engine.last_node.kill()
        with pytest.raises(HostLost) as lost:
            while True:
                engine.step()
        expected = (
            r"rank 10(16|17|18|19|20|21|22|23) \(node 127, host h127 at 127\.0\.0\.1, pid \d+\) died in a step by "
        )
        assert re.match(expected + "loss of its node: ", str(lost.value))
    assert count_open_files() < before + 64, "no connection is left; rings live as long as the executor"
    assert list(tmp_path.iterdir()) == []


def test_too_few_open_files_are_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, ranks whose connection is not accepted would wait for ever."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(
        CapacityError, match="1024 ranks need 4352 open files in one process, but only 1024 are allowed"
    ):
        FakeRanksEngine(NODES, RANKS_PER_NODE)
