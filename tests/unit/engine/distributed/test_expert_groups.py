"""Messages between engines that share experts before their ranks join the expert-parallel groups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.common.errors import EngineError
from serve_llm.common.hosts import host_id
from serve_llm.engine.distributed.expert_groups import ExpertParallelGroups
from serve_llm.engine.distributed.messages import LOOPBACK, ExpertGroupSetup
from serve_llm.engine.parallel.dp_sync import DPStepSync
from support.config import CONFIG

HERE = host_id()


def join(
    directory: Path, host_ids: Sequence[Sequence[str]], address: str = "", device: str = "cpu"
) -> list[list[ExpertGroupSetup]]:
    """Let all engines join. host_ids: of each engine's ranks. Returns how they join."""
    engines = len(host_ids)
    config = replace(CONFIG, device=device, data_parallel_size=engines, enable_expert_parallel=True)
    groups = [
        ExpertParallelGroups(config, DPStepSync(directory, engine, engines), address) for engine in range(engines)
    ]
    try:
        with ThreadPoolExecutor(engines) as pool:
            return list(pool.map(lambda group, hosts: group.join(hosts), groups, host_ids))
    finally:
        for group in groups:
            group.sync.close()


def test_ranks_of_one_host_share_memory(tmp_path: Path) -> None:
    setups = join(tmp_path, [[HERE, HERE], [HERE, HERE], [HERE, HERE]])
    for rank in range(2):
        assert setups[0][rank] == setups[1][rank] == setups[2][rank]
        assert len(setups[0][rank].rings) == 3 and setups[0][rank].store_port == 0
    assert setups[0][0].rings != setups[0][1].rings


def test_only_groups_on_several_hosts_use_the_network(tmp_path: Path) -> None:
    setups = join(tmp_path, [[HERE, HERE], [HERE, "elsewhere"]], LOOPBACK)
    assert len(setups[0][0].rings) == 2
    assert setups[0][1] == setups[1][1]
    assert setups[0][1].rings == [] and setups[0][1].store == LOOPBACK and setups[0][1].store_port > 0


def test_ranks_of_one_other_host_use_the_network(tmp_path: Path) -> None:
    setups = join(tmp_path, [["elsewhere"], ["elsewhere"]], LOOPBACK)
    assert setups[0][0].rings == [] and setups[0][0].store_port > 0


def test_gpus_meet_in_a_store(tmp_path: Path) -> None:
    setups = join(tmp_path, [[HERE], [HERE]], device="cuda")
    assert setups[0][0].rings == [] and setups[0][0].store == LOOPBACK and setups[0][0].store_port > 0


def test_a_rank_that_dies_meanwhile_is_the_cause(tmp_path: Path) -> None:
    def fail() -> None:
        raise EngineError("rank 0 died while joining the others")

    config = replace(CONFIG, device="cpu", data_parallel_size=2, enable_expert_parallel=True)
    sync = DPStepSync(tmp_path, 0, 2)
    with pytest.raises(EngineError, match="rank 0 died"):
        ExpertParallelGroups(config, sync).join([HERE], fail)
    sync.close()
