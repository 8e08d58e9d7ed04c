"""Adapters on the GPU path: captured steps give the right results for any adapters in the slots."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.output import SchedulerOutput
from serve_llm.engine.worker.warm_up import warm_up
from serve_llm.engine.worker.worker import Worker
from serve_llm.kernels import registry
from support import gpu_path
from support.adapter_requests import OPTIONS, PROMPTS, ask, ask_all, llama
from support.adapters import make_adapter
from support.engine import generate, greedy, make_engine
from support.gpu_path import assert_same, graphs_of, make_gpu_engine
from support.tiny import make_checkpoint
from support.triton import NO_TRITON

# from PEFT
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("how", [{}, {"tensor": 2}, {"stages": 2}], ids=str)
def test_same_tokens_as_the_plain_engine(how: dict[str, int], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five adapters, DoRA among them, take turns in two slots, in batches with the base model."""
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, logprobs=1)
    arrivals = [number // 2 for number in range(len(requests))]
    expected = generate(make_engine(checkpoint, max_loras=2, **OPTIONS), requests, arrivals)
    monkeypatch.setattr(AdapterSlots, "TURN", 3)
    engine = make_gpu_engine(checkpoint, monkeypatch, max_loras=2, **OPTIONS, **how)
    assert_same(generate(engine, requests, arrivals), expected)
    if not how:
        graphs = graphs_of(engine)
        kinds = {(size.is_mixed, size.has_adapters) for size in graphs._graphs}
        assert {(False, True), (True, True)} <= kinds, "steps with adapters were captured"
        assert all(
            (buffers.inputs.adapter_slots is None) != size.has_adapters for size, buffers in graphs._buffers.items()
        )


@pytest.mark.parametrize("how", [{}, {"tensor": 2}, {"stages": 2}], ids=str)
def test_prompts_in_chunks(how: dict[str, int], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In most steps no id is sampled, and the last layer's MLP computes one token whose result is not read."""
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, logprobs=1)
    expected = generate(make_engine(checkpoint, **OPTIONS), requests)
    engine = make_gpu_engine(checkpoint, monkeypatch, max_num_batched_tokens=4, max_num_seqs=2, **OPTIONS, **how)
    assert_same(generate(engine, requests), expected)


def test_a_captured_step_of_the_base_model_has_nothing_of_the_adapters_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine captures sizes immediately after steps with adapters."""
    checkpoint, adapters = llama(root)
    engine = make_gpu_engine(checkpoint, monkeypatch, **OPTIONS)
    generate(engine, [ask(0, PROMPTS[0], adapters[1])])
    added: list[int] = []
    monkeypatch.setattr(gpu_path.AdapterSlots, "add", lambda layer, y, x, slots: added.append(len(x)))
    worker: Worker = engine._executor._worker  # type: ignore[attr-defined]
    for size in graphs_of(engine).decode_sizes:
        worker.start(SchedulerOutput([], [], capture_size=size)).finish()
    assert not added and len(graphs_of(engine)._graphs) > len(graphs_of(engine).decode_sizes)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["experts", "embedding"],
)
def test_what_cannot_be_captured(fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with an adapter of experts or of the embedding run eagerly as a whole. Steps with another adapter of the
    same model, of its routers and head, are then captured."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "qwen3_moe")
    others: dict[str, object] = {"target_modules": ["q_proj", "lm_head"], "target_parameters": ["gate.weight"]}
    captured = make_adapter(checkpoint, tmp_path / "captured", seed=1, **others)
    eager = make_adapter(checkpoint, tmp_path / "eager", seed=2, **fields)
    plain = make_engine(checkpoint, **OPTIONS)
    engine = make_gpu_engine(checkpoint, monkeypatch, **OPTIONS)
    mixed = [request for request in ask_all([captured, eager]) if request.adapter is eager]
    for requests, is_captured in ((mixed, False), (ask_all([None, captured]), True)):
        assert_same(generate(engine, requests), generate(plain, requests))
        assert any(size.has_adapters for size in graphs_of(engine)._graphs) == is_captured
    both = ask_all([captured, eager])
    assert_same(generate(engine, both), generate(plain, both))


def test_steps_with_adapters_are_captured_at_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are captured with an empty slot; adapters that are loaded later use these graphs."""
    checkpoint, adapters = llama(root)
    requests = [ask(0, PROMPTS[2], adapters[4])]
    expected = generate(make_engine(checkpoint, **OPTIONS), requests)
    engine = make_gpu_engine(checkpoint, monkeypatch, **OPTIONS)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    warm_up(worker._runner, worker._config, worker._kv_cache_config)
    captured = {size for size in graphs_of(engine)._graphs if size.has_adapters}
    assert {(size.tokens, size.is_mixed) for size in captured} == {(16, True), (1, False)}
    assert_same(generate(engine, requests), expected)
    assert {size for size in graphs_of(engine)._graphs if size.has_adapters} == captured


@pytest.mark.slow
def test_with_tritons_kernels_in_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    kernels = registry.with_triton(batch_invariant=True)
    assert isinstance(kernels, registry.Kernels), kernels
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "qwen3", num_hidden_layers=1, layer_types=None)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", r=5, use_dora=True)
    requests = [
        msgspec.structs.replace(greedy(number, [300, 2, 45], 4), adapter=one)
        for number, one in enumerate([None, adapter])
    ]
    options = {**OPTIONS, "max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 2}
    expected = generate(make_engine(checkpoint, **options), requests)
    engine = make_gpu_engine(checkpoint, monkeypatch, kernels, **options)
    assert_same(generate(engine, requests), expected)
    assert any(size.has_adapters for size in graphs_of(engine)._graphs)
