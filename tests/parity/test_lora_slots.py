"""More adapters than slots: results do not depend on an adapter's slot, or on how often it was loaded."""

from __future__ import annotations

import shutil
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from serve_llm.common.errors import EngineError
from serve_llm.engine.lora.files import read_adapter, start_reading
from serve_llm.engine.lora.hashed_files import HashedFiles, read_files
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.weights import adapters as weights
from serve_llm.engine.weights.adapters import AdapterLoad, AdapterLoader
from support.adapter_files import describe, write_adapter
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
    load = AdapterLoader._load

    def count(self: AdapterLoader, one: AdapterLoad, reads: object) -> None:
        if not self._memory.is_in_slot(one.adapter.digest, one.slot):
            loaded.append(one.adapter.name)
        load(self, one, reads)

    monkeypatch.setattr(AdapterLoader, "_load", count)
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

    def count(threads: Executor, directory: Path, *arguments: object) -> HashedFiles:
        read.append(directory)
        return start_reading(threads, directory, *arguments)

    monkeypatch.setattr(weights, "start_reading", count)
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
    monkeypatch.setattr(loader, "_build", lambda modules: nothing)
    monkeypatch.setattr(weights, "start_reading", lambda *arguments: read.append(1) or start_reading(*arguments))
    for number in (0, 1, 0, 2, 0, 1):
        loader.load([AdapterLoad(0, chosen[number])])
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


def hold(loader: AdapterLoader, slot: int) -> list[object]:
    """Return what the slot holds in each layer, as bytes."""
    products = [layer.products.get(slot) for layer in loader.layers.layers]
    return [None if one is None else [weight.numpy().tobytes() for weight in one._weights] for one in products]


def test_ways_to_read_an_adapter(root: Path, tmp_path: Path) -> None:
    """Two at a time, from files that another host sent, and with numbers that are not aligned: the same bits."""
    checkpoint, adapters = llama(root)
    first, second = (adapter for adapter in adapters[1:3] if adapter is not None)
    loader = make_engine(checkpoint, max_loras=4, **OPTIONS)._executor._worker._adapters
    loader.load([AdapterLoad(0, first), AdapterLoad(1, second), AdapterLoad(1, second)])
    loader.load([AdapterLoad(2, first)])
    directory = tmp_path / "shifted"
    shutil.copytree(first.directory, directory)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes((end - 7).to_bytes(8, "little") + whole[8:end] + b" " + whole[end:])
    assert read_adapter(directory, loader._targets, 128).modules
    loader.load([AdapterLoad(3, describe(directory))])
    assert hold(loader, 0) == hold(loader, 2) == hold(loader, 3)
    loader.load([AdapterLoad(0, describe(directory), read_files(directory)), AdapterLoad(3, second)])
    assert hold(loader, 0) == hold(loader, 2)
    assert hold(loader, 1) == hold(loader, 3) != hold(loader, 0)


@pytest.mark.parametrize("number", [2, 4])  # without and with DoRA
def test_files_that_change_while_they_are_loaded(root: Path, tmp_path: Path, number: int) -> None:
    """The engine's check of the files, before a request is scheduled, does not see it."""
    checkpoint, adapters = llama(root)
    before, unchanged, after = adapters[1], adapters[3], adapters[number]
    assert before is not None and unchanged is not None and after is not None
    directory = tmp_path / "changing"
    shutil.copytree(before.directory, directory)
    adapter = describe(directory)
    shutil.copytree(after.directory, directory, dirs_exist_ok=True)
    loader = make_engine(checkpoint, max_loras=2, **OPTIONS)._executor._worker._adapters
    num_threads = torch.get_num_threads()
    with pytest.raises(EngineError, match=r"^the files of the adapter changing have changed while it was being"):
        loader.load([AdapterLoad(0, unchanged), AdapterLoad(1, adapter)])
    assert torch.get_num_threads() == num_threads
    assert any(hold(loader, 0)) and not any(hold(loader, 1))
    shutil.rmtree(directory)
    with pytest.raises(EngineError, match=r"^the adapter changing cannot be loaded again: "):
        loader.load([AdapterLoad(1, adapter)])
