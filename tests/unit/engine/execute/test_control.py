"""The messages between executor and ranks, and what they say about a process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import control
from serve_llm.engine.execute.control import (
    Alive,
    Allocate,
    Begin,
    Failed,
    Joined,
    Loaded,
    Ready,
    RingEnds,
    Rings,
    Span,
    StepsUrl,
    Wire,
    Wired,
)
from serve_llm.engine.execute.executors.mp import check_hosts
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.threads import Threads
from serve_llm.engine.parallel.hosts import fingerprint
from serve_llm.engine.parallel.shm import Handle
from serve_llm.engine.schedule.sequence import GroupLayout
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
    rope_turns_at=4096,
)


def test_every_message_survives_the_wire() -> None:
    handle = Handle(1, 2, 3)
    rings = Rings([handle, handle], None, handle)
    span = Span(["a", "b"], "10.0.0.1", 5)
    to_rank = [
        Wire(2, 2, [2, 3], 100, True),
        Begin(CONFIG, '{"a": Infinity}', 4, 1, "info", RingEnds(handle, 0, None), rings, None),
        Begin(CONFIG, "{}", 4, 1, "info", StepsUrl("tcp://10.0.0.1:6"), rings, span),
        Allocate(7),
    ]
    layout = CacheLayout((GroupLayout(8, None), GroupLayout(16, 37)), 4096, 7)
    from_rank = [
        control.hello(3),
        Alive(3),
        Wired({2: rings}, 4711),
        Joined(),
        Loaded(9, Threads(2, "2 cores for 1 rank", 2, 1)),
        Ready(layout),
    ]
    from_rank += [Failed("in a step", "ModelError", "x")]
    assert [control.decode_to_rank(control.encode(message)) for message in to_rank] == to_rank
    assert [control.decode_from_rank(control.encode(message)) for message in from_rank] == from_rank


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        control.decode_to_rank(control.encode(Joined()))


def test_hello_says_who_and_where() -> None:
    hello = control.hello(3)
    assert (hello.rank, hello.pid, hello.host_id) == (3, os.getpid(), control.host_id())
    assert hello.fingerprint == fingerprint(None) and hello.address == ""


def test_hosts_that_differ_are_named(tmp_path: Path) -> None:
    for name in ("here", "there"):
        make_checkpoint(tmp_path / name, "llama")
    here = str(tmp_path / "here")
    hello = control.hello(0, "10.0.0.1")
    check_hosts([hello], here)  # the engine's own host is not compared
    other = msgspec.structs.replace(control.hello(1, "10.0.0.2", here), host="there", host_id="x")
    check_hosts([hello, other], here)
    old = msgspec.structs.replace(other, fingerprint=msgspec.structs.replace(other.fingerprint, torch="2.0.0"))
    with pytest.raises(
        EngineError, match=r"the host there \(10\.0\.0\.2\) has torch 2\.0\.0, the engine's host has \d"
    ):
        check_hosts([hello, old], here)
    changed = json.loads((tmp_path / "there/config.json").read_text()) | {"rope_theta": 1.0}
    (tmp_path / "there/config.json").write_text(json.dumps(changed))
    prints = control.hello(1, "10.0.0.2", str(tmp_path / "there")).fingerprint
    with pytest.raises(
        EngineError, match=r"the host there \(10\.0\.0\.2\) has config\.json \w+, the engine's host has"
    ):
        check_hosts([hello, msgspec.structs.replace(other, fingerprint=prints)], here)


def test_a_config_is_the_same_on_the_other_side() -> None:
    steps = RingEnds(Handle(1, 2, 3), 0, None)
    begin = Begin(replace(CONFIG, kv_cache_memory=2**40), "{}", 1, 0, "info", steps, Rings([], None, None), None)
    decoded = control.decode_to_rank(control.encode(begin))
    assert isinstance(decoded, Begin) and decoded.config == begin.config
