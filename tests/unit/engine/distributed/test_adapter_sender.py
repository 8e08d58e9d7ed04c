"""Ranks on other hosts get an adapter's files with the step that needs it, unless they already hold it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from serve_llm.common.errors import EngineError
from serve_llm.common.types import Adapter, Sampling
from serve_llm.engine.distributed.adapter_sender import AdapterSender
from serve_llm.engine.scheduler.output import NewRequestData, SchedulerOutput


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f"config {name}")
        (tmp_path / name / "adapter_model.safetensors").write_text(f"weights {name}")
    return [Adapter(name, str(tmp_path / name), f"digest {name}") for name in "abc"]


def admit(*adapters: tuple[Adapter | None, int | None]) -> SchedulerOutput:
    sampling = Sampling(max_tokens=1, seed=0)
    new = [NewRequestData(0, [1], 1, sampling, None, adapter=adapter, adapter_slot=slot) for adapter, slot in adapters]
    return SchedulerOutput(new, [])


def list_sent(step: SchedulerOutput | None) -> list[str]:
    """Return the configs of the files that a step's requests carry, as ranks decode them."""
    if step is None:
        return []
    step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=SchedulerOutput)
    return [new.adapter_files.config.decode() for new in step.new_requests if new.adapter_files is not None]


def test_files_go_out_when_they_are_needed(adapters: list[Adapter]) -> None:
    a, b, c = adapters
    sender = AdapterSender(max_kept=2)
    assert sender.add_files(admit((None, None))) is None
    assert list_sent(sender.add_files(admit((a, 0), (None, None), (a, 0), (b, 1)))) == ["config a", "config b"]
    assert sender.add_files(admit((b, 1), (a, 0))) is None
    assert list_sent(sender.add_files(admit((c, 0)))) == ["config c"]  # evicts a
    assert list_sent(sender.add_files(admit((a, 0)))) == ["config a"]  # evicts c


def test_what_ranks_keep_in_host_memory_is_not_sent_again(adapters: list[Adapter]) -> None:
    a, b, c = adapters
    sender = AdapterSender(max_kept=2)
    sent = [list_sent(sender.add_files(admit((adapter, 0)))) for adapter in (a, b, a, c, a, b)]
    assert sent == [["config a"], ["config b"], [], ["config c"], [], ["config b"]]


def test_files_that_are_gone(adapters: list[Adapter], tmp_path: Path) -> None:
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(EngineError, match=r"the adapter a cannot be sent to other hosts: .*adapter_config.json cannot"):
        AdapterSender(1).add_files(admit((adapters[0], 0)))
