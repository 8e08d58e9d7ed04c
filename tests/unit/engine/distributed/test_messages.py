"""The messages between executor and ranks, and how they describe a process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from serve_llm.common.errors import EngineError
from serve_llm.common.hosts import fingerprint
from serve_llm.common.messages import Failed
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed.messages import (
    AllocateCache,
    CacheReady,
    ChannelsReady,
    GroupsReady,
    InitWorker,
    LoadDone,
    RankRings,
    Rendezvous,
    SetupChannels,
    StepRings,
    StepsUrl,
    WorkerAlive,
)
from serve_llm.engine.distributed.mp import check_hosts
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.cpu_threads import CpuThreads
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig
from support import config
from support.tiny import make_checkpoint

CONFIG = replace(
    config.CONFIG,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    tensor_parallel_split=(3.0, 1.0),
    pipeline_parallel_layers=(4, 2),
    enable_expert_parallel=True,
    executor_backend="mp",
    long_rope_threshold=4096,
)


def test_every_message_survives_the_wire() -> None:
    handle = ShmHandle(1, 2, 3)
    rings = RankRings([handle, handle], None, handle)
    span = Rendezvous(["a", "b"], "10.0.0.1", 5)
    to_rank = [
        SetupChannels(2, 2, [2, 3], 100, True),
        InitWorker(CONFIG, '{"a": Infinity}', 4, 1, "info", StepRings(handle, 0, None), rings, None),
        InitWorker(CONFIG, "{}", 4, 1, "info", StepsUrl("tcp://10.0.0.1:6"), rings, span),
        AllocateCache(7, 3),
    ]
    kv_cache_config = KVCacheConfig((KVCacheSpec(8, None), KVCacheSpec(16, 37)), 4096, 7)
    from_rank = [
        messages.build_hello(3),
        WorkerAlive(3),
        ChannelsReady({2: rings}, 4711),
        GroupsReady(),
        LoadDone(9, 1 << 40, CpuThreads(2, "2 cores for 1 rank", 2, 1)),
        CacheReady(kv_cache_config, HostMemory(ShmHandle(1, 2, 3), 3, 4096, 0.5)),
    ]
    from_rank += [Failed("ModelError", "x")]
    assert [messages.decode_to_rank(messages.encode(message)) for message in to_rank] == to_rank
    assert [messages.decode_from_rank(messages.encode(message)) for message in from_rank] == from_rank


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_to_rank(messages.encode(GroupsReady()))


def test_hello_says_who_and_where() -> None:
    hello = messages.build_hello(3)
    assert (hello.rank, hello.pid, hello.host_id) == (3, os.getpid(), messages.host_id())
    assert hello.fingerprint == fingerprint(None) and hello.address == ""


def test_hosts_that_differ_are_named(tmp_path: Path) -> None:
    for name in ("here", "there"):
        make_checkpoint(tmp_path / name, "llama")
    here = str(tmp_path / "here")
    hello = messages.build_hello(0, "10.0.0.1")
    check_hosts([hello], here)  # the engine's own host is not compared
    other = msgspec.structs.replace(messages.build_hello(1, "10.0.0.2", here), host="there", host_id="x")
    check_hosts([hello, other], here)
    old = msgspec.structs.replace(other, fingerprint=msgspec.structs.replace(other.fingerprint, torch="2.0.0"))
    with pytest.raises(
        EngineError, match=r"the host there \(10\.0\.0\.2\) has torch 2\.0\.0, the engine's host has \d"
    ):
        check_hosts([hello, old], here)
    changed = json.loads((tmp_path / "there/config.json").read_text()) | {"rope_theta": 1.0}
    (tmp_path / "there/config.json").write_text(json.dumps(changed))
    prints = messages.build_hello(1, "10.0.0.2", str(tmp_path / "there")).fingerprint
    with pytest.raises(
        EngineError, match=r"the host there \(10\.0\.0\.2\) has config\.json \w+, the engine's host has"
    ):
        check_hosts([hello, msgspec.structs.replace(other, fingerprint=prints)], here)


def test_a_config_is_the_same_on_the_other_side() -> None:
    steps = StepRings(ShmHandle(1, 2, 3), 0, None)
    begin = InitWorker(
        replace(CONFIG, kv_cache_memory=2**40), "{}", 1, 0, "info", steps, RankRings([], None, None), None
    )
    decoded = messages.decode_to_rank(messages.encode(begin))
    assert isinstance(decoded, InitWorker) and decoded.config == begin.config
