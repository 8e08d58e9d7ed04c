"""More adapters than slots: results do not depend on an adapter's slot, or on how often it was loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_llm.common.types import Adapter
from serve_llm.engine.lora.files import AdapterContents, read_adapter
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.weights import adapters as weights
from serve_llm.engine.weights.adapters import AdapterLoader
from support.adapter_files import write_adapter
from support.adapter_requests import OPTIONS, PROMPTS, ask, ask_all, check_equal, llama
from support.engine import generate, make_engine

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.slow
def test_200_adapters_of_which_8_are_resident(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is loaded once, requests are answered in order, and results are the same as if all adapters were
    resident."""
    checkpoint, _ = llama(root)
    layers = {f"model.layers.{layer}.self_attn.o_proj": (60, 96) for layer in range(3)}
    adapters = [write_adapter(tmp_path / str(number), layers, 2 + number % 5, number) for number in range(200)]
    requests = [ask(number, PROMPTS[number // 2 % 3], adapters[number // 2]) for number in range(400)]
    expected = generate(make_engine(checkpoint, max_loras=200, **OPTIONS), requests)
    loaded = []
    load = AdapterLoader.load

    def count(self: AdapterLoader, slot: int, adapter: Adapter, files: None) -> None:
        if not self._memory.is_in_slot(adapter.digest, slot):
            loaded.append(adapter.name)
        load(self, slot, adapter, files)

    monkeypatch.setattr(AdapterLoader, "load", count)
    engine = make_engine(checkpoint, max_loras=8, **OPTIONS)
    check_equal(generate(engine, requests), expected)
    assert loaded == [adapter.name for adapter in adapters]


@pytest.mark.parametrize(("max_kept", "num_reads"), [(None, 8), (3, 8), (4, 4)])
def test_adapters_are_kept_in_host_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch, max_kept: int | None, num_reads: int
) -> None:
    """Four adapters take turns in one slot, twice: the least recently used one is read from its files again."""
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, logprobs=2)
    expected = generate(make_engine(checkpoint, **OPTIONS), requests)
    read = []

    def count(directory: Path, *arguments: object) -> AdapterContents:
        read.append(directory)
        return read_adapter(directory, *arguments)

    monkeypatch.setattr(weights, "read_adapter", count)
    engine = make_engine(checkpoint, max_loras=1, max_cpu_loras=max_kept, **OPTIONS)
    for adapter in [*adapters, *adapters]:  # one at a time: the order of concurrent requests depends on the machine
        check_equal(generate(engine, [one for one in requests if one.adapter is adapter]), expected)
    assert len(read) == num_reads


def test_a_gpu_is_filled_from_files_kept_in_host_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, adapters = llama(root)
    chosen = [adapter for adapter in adapters if adapter is not None]
    loader = make_engine(checkpoint, max_loras=1, max_cpu_loras=2, **OPTIONS)._executor._worker._adapters
    read = []
    monkeypatch.setattr(loader, "_device", SimpleNamespace(type="cuda"))
    nothing = weights._BuiltAdapter([None] * len(loader.layers.layers), None, False)
    monkeypatch.setattr(loader, "_build", lambda contents: nothing)
    monkeypatch.setattr(
        weights, "read_adapter", lambda directory, *rest: read.append(1) or read_adapter(directory, *rest)
    )
    for number in (0, 1, 0, 2, 0, 1):
        loader.load(0, chosen[number])
    assert len(read) == 4  # the second one was evicted


@pytest.mark.parametrize("caching", [True, False])
def test_adapters_that_take_turns(root: Path, monkeypatch: pytest.MonkeyPatch, caching: bool) -> None:
    """Requests that are preempted because another adapter gets the slot continue with the same bits."""
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, temperature=1.0, logprobs=2)
    expected = generate(make_engine(checkpoint, **OPTIONS), requests)
    monkeypatch.setattr(AdapterSlots, "TURN", 3)
    engine = make_engine(checkpoint, max_loras=1, enable_prefix_caching=caching, **OPTIONS)
    check_equal(generate(engine, requests), expected)
    assert engine.scheduler.stats().num_preemptions > 0
