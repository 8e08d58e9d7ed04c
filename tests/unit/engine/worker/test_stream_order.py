"""The order of copies, events and captures on a GPU, recorded without one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.transfer import DeviceCopier, PendingWork
from serve_llm.engine.worker.graphs import CudaCapture
from serve_llm.engine.worker.pending_step import add_hidden_states, add_vectors, finish_after
from support.engine import generate, greedy, make_engine
from support.tiny import make_checkpoint

DEVICE = torch.device("meta")  # any device but the CPU


class Event:
    def __init__(self, notes: list[str]) -> None:
        self._notes, self.happened = notes, False

    def record(self) -> None:
        self._notes.append("event recorded")

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._notes.append("waited for the event")


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self._notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def capture_begin(self, **how: str) -> None:
        self._notes.append(f"begin {how}")

    def capture_end(self) -> None:
        self._notes.append("end")

    def replay(self) -> None:
        self._notes.append("replay")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    current = Stream("the engine's stream", found)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append(f"off {stream.name}")

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def with_note(*args: Any, **how: Any) -> Any:
            pinned, waits = how.pop("pin_memory", False), not how.get("non_blocking")
            found.append(f"{name}{', pinned' * pinned}{', waits' * (waits and name in ('to', 'copy_'))}")
            return call(*args, **how)

        return with_note

    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("its own stream", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(found))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.setattr(torch, "empty", noted("empty", torch.empty))
    monkeypatch.setattr(Tensor, "copy_", noted("copy_", Tensor.copy_))
    monkeypatch.setattr(Tensor, "to", noted("to", Tensor.to))
    return found


def test_a_copy_to_the_host_ends_with_its_event(notes: list[str]) -> None:
    arriving = DeviceCopier(DEVICE).to_host(torch.arange(5))
    assert notes == ["empty, pinned", "copy_", "event recorded"]
    assert not arriving.is_ready
    assert arriving.wait().tolist() == [0, 1, 2, 3, 4] and notes[-1] == "waited for the event"
    assert isinstance(arriving.work.event, Event)
    arriving.work.event.happened = True
    assert arriving.is_ready


def test_a_step_without_samples_ends_with_the_work_on_the_device(notes: list[str]) -> None:
    work = DeviceCopier(DEVICE).record()
    results = [RunnerOutput()]
    step = finish_after(work, results)
    assert notes == ["event recorded"] and not step.is_ready()
    assert step.finish() is results and notes[-1] == "waited for the event"
    assert isinstance(work.event, Event)
    work.event.happened = True
    assert step.is_ready()


def test_vectors_and_states_travel_while_the_next_step_is_computed(notes: list[str]) -> None:
    """Copies that begin only when results are read would also wait for steps that were started in the meantime."""
    copier = DeviceCopier(DEVICE)
    work = copier.record()
    step = add_vectors(finish_after(work, [RunnerOutput(), RunnerOutput()]), {1: torch.tensor([0.5, 2.0])}, copier)
    step = add_hidden_states(step, [torch.ones((3, 2)), torch.zeros((3, 2))], [0, 1, 3], copier)
    copied = ["empty, pinned", "copy_", "event recorded"]
    assert notes == ["event recorded", *copied, *copied]
    assert isinstance(work.event, Event)
    work.event.happened = True
    assert not step.is_ready(), "the copies are still under way"
    first, second = step.finish()
    assert notes[7:] == ["waited for the event"] * 3
    assert first.vector is None and second.vector == np.array([0.5, 2.0], np.float32).tobytes()
    row = np.array([1, 1, 0, 0], np.float32).tobytes()
    assert (first.hidden_states, second.hidden_states) == (row, 2 * row)


def test_each_chunk_of_a_prompt_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the engine would reuse blocks that the device is still writing."""
    vocab_size = make_checkpoint(tmp_path, "llama")
    steps: list[str] = []
    real = DeviceCopier.record

    class Noted(PendingWork):
        def wait(self) -> None:
            steps.append("waited for")

    def record(copier: DeviceCopier) -> PendingWork:
        steps.append("started")
        return Noted(real(copier).event)

    engine = make_engine(tmp_path, max_num_batched_tokens=16)
    monkeypatch.setattr(DeviceCopier, "record", record)
    found = generate(engine, [greedy(0, [token % vocab_size for token in range(40)], 1)])
    assert len(found[0].token_ids) == 1 and steps == ["started", "waited for"] * 2


def test_numbers_for_the_device_go_through_pinned_memory(notes: list[str]) -> None:
    transfer, numbers = DeviceCopier(DEVICE), np.arange(6).reshape(2, 3)
    assert transfer.to_device(numbers[:, 1:]).shape == (2, 2)
    target = torch.zeros((2, 3), dtype=torch.int64)
    transfer.fill(target, numbers)
    assert target.tolist() == numbers.tolist()
    pinned = ["empty, pinned", "copy_, waits"]
    assert notes == [*pinned, "to", *pinned, "copy_"]


def test_a_capture_has_a_stream_of_its_own_between_the_engines_launches(notes: list[str]) -> None:
    def compute() -> Tensor:
        notes.append("compute")
        assert not gc.isenabled(), "a graph that is destroyed now ends the capture"
        return torch.ones(2)

    captured = CudaCapture(DEVICE)(compute)
    assert gc.isenabled()
    captured.replay()
    assert captured.output.tolist() == [1.0, 1.0]
    assert notes == [
        "its own stream waits for the engine's stream",
        "on its own stream",
        "begin {'pool': 'a pool', 'capture_error_mode': 'thread_local'}",
        "compute",
        "end",
        "off its own stream",
        "the engine's stream waits for its own stream",
        "replay",
    ]


def test_a_capture_that_fails_ends_and_says_why(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(_: Graph) -> None:
        notes.append("end")
        raise RuntimeError("capture invalidated")

    def compute() -> Tensor:
        raise ValueError("no such kernel")

    monkeypatch.setattr(Graph, "capture_end", failed)
    with pytest.raises(ValueError, match="no such kernel"):
        CudaCapture(DEVICE)(compute)
    assert notes[-1] == "end" and gc.isenabled()
