"""The messages between executor and ranks, and what they say about a process."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest

from serve_llm.engine.config import Config
from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import control
from serve_llm.engine.execute.control import Allocate, Begin, Failed, Hello, Joined, Loaded, Ready, Rings
from serve_llm.engine.execute.executors.mp import check_versions
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.parallel.shm import Handle
from serve_llm.engine.schedule.sequence import GroupLayout

CONFIG = Config(
    directory="/models/demo",
    load_format="auto",
    device="cpu",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=8,
    kv_cache_memory=None,
    gpu_memory_utilization=0.9,
    enable_prefix_caching=True,
    seed=0,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    tensor_parallel_split=(3.0, 1.0),
    pipeline_parallel_layers=(4, 2),
    executor_backend="mp",
)


def test_every_message_survives_the_wire() -> None:
    handle = Handle(1, 2, 3)
    rings = Rings(handle, 0, None, [handle, handle], None, handle)
    to_rank = [Begin(CONFIG, '{"a": Infinity}', 4, 1, "info", rings), Allocate(7)]
    layout = CacheLayout((GroupLayout(8, None), GroupLayout(16, 37)), 4096, 7)
    from_rank = [control.hello(3), Joined(), Loaded(9), Ready(layout), Failed("in a step", "ModelError", "x")]
    assert [control.decode_to_rank(control.encode(message)) for message in to_rank] == to_rank
    assert [control.decode_from_rank(control.encode(message)) for message in from_rank] == from_rank


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        control.decode_to_rank(control.encode(Joined()))


def test_hello_says_who_and_where() -> None:
    hello = control.hello(3)
    assert (hello.rank, hello.pid, hello.host_id) == (3, os.getpid(), control.host_id())
    assert hello.versions.keys() == {"serve-llm", "torch", "Python"} and all(hello.versions.values())


def test_ranks_of_other_versions_are_named() -> None:
    hello = control.hello(0)
    check_versions([hello])
    other = Hello(1, "there", "x", 5, hello.versions | {"torch": "2.0.0"})
    with pytest.raises(EngineError, match=r"rank 1 \(host there\) has torch 2\.0\.0, but the engine has"):
        check_versions([hello, other])


def test_a_config_is_the_same_on_the_other_side() -> None:
    rings = Rings(Handle(1, 2, 3), 0, None, [], None, None)
    begin = Begin(replace(CONFIG, kv_cache_memory=2**40), "{}", 1, 0, "info", rings)
    decoded = control.decode_to_rank(control.encode(begin))
    assert isinstance(decoded, Begin) and decoded.config == begin.config
