"""Models with linear attention in the engine: states of sequences are allocated, freed and recomputed."""

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.engine import Result, assert_equal, generate, make_engine
from support.grammars import compile_grammar, constrained, demo
from support.matrix import mostly_slow
from support.refused_pairs import OPTIONS, REFUSED_OPTIONS
from support.tiny import HYBRIDS, make_checkpoint

FAMILY = "qwen3_next"
PROMPT = [(7 * n * n + 3 * n) % 331 for n in range(45)]
SAMPLED = Sampling(max_tokens=14, seed=1234, temperature=0.9, logprobs=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(path, FAMILY)
    return path


def random_request(number: int, rng: random.Random) -> EngineCoreRequest:
    prompt = [rng.randrange(331) for _ in range(rng.choice([1, 2, 9, 30, 60]))]
    sampling = Sampling(
        max_tokens=rng.randrange(1, 20),
        seed=rng.randrange(1000),
        temperature=rng.choice([0.0, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logprobs=rng.choice([None, 3]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )
    return EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling, priority=rng.choice([0, 0, 1]))


def alone(directory: Path, request: EngineCoreRequest) -> Result:
    return generate(make_engine(directory, block_size=8), [request])[request.id]


def small_memory(directory: Path, num_blocks: int, **options: object) -> int:
    """Return the bytes of this many blocks and the states that go with them."""
    return replace(make_engine(directory, block_size=8, **options).kv_cache_config, num_blocks=num_blocks).num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_same_bits_in_random_co_batches(dtype: str, directory: Path) -> None:
    request = EngineCoreRequest(id=0, prompt_ids=PROMPT, sampling=SAMPLED)
    expected = generate(make_engine(directory, block_size=8, dtype=dtype), [request])[0]
    rng = random.Random(11)
    engines = [make_engine(directory, block_size=8, dtype=dtype, max_num_batched_tokens=size) for size in (2048, 7, 64)]
    for trial in range(30):
        others = [random_request(number, rng) for number in range(1, rng.randrange(2, 7))]
        found = generate(engines[trial % 3], [request, *others], [rng.randrange(6) for _ in range(len(others) + 1)])[0]
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_replayed_request_goes_on_with_the_same_bits(directory: Path) -> None:
    whole = alone(directory, EngineCoreRequest(id=0, prompt_ids=PROMPT, sampling=SAMPLED))
    for cut in range(1, len(whole.token_ids)):
        rest = alone(
            directory, EngineCoreRequest(id=0, prompt_ids=PROMPT, output_ids=whole.token_ids[:cut], sampling=SAMPLED)
        )
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert whole.logprobs[cut:] == rest.logprobs


def run_with_aborts(engine: EngineCore, requests: list[EngineCoreRequest], doomed: set[int]) -> dict[int, Result]:
    results = {request.id: Result() for request in requests}
    rng = random.Random(5)
    waiting = list(requests)
    while waiting or engine.has_work:
        engine.add_requests(waiting[:2])
        waiting = waiting[2:]
        for output in engine.step().outputs:
            results[output.id].add(output)
        running = [number for number in sorted(doomed) if results[number].token_ids]
        if running and rng.random() < 0.5:
            engine.scheduler.abort(running[0])
            doomed.discard(running[0])
            results.pop(running[0])
        engine.scheduler.check_integrity()
    return results


def test_slots_are_freed_by_ends_aborts_and_preemptions(directory: Path) -> None:
    rng = random.Random(3)
    requests = [random_request(number, rng) for number in range(40)]
    expected = generate(make_engine(directory, block_size=8, max_model_len=80), requests)
    engine = make_engine(
        directory,
        block_size=8,
        max_model_len=80,
        max_num_batched_tokens=24,
        kv_cache_memory=small_memory(directory, 16, max_model_len=80),
    )
    num_states = engine.kv_cache_config.num_states
    assert 1 < num_states < 16
    assert len(engine.scheduler._running._free_indices) == num_states
    for _ in range(2):
        found = run_with_aborts(engine, requests, set(range(0, 40, 5)))
        assert_equal(found, {number: expected[number] for number in found})
        assert len(found) > 30
        assert len(engine.scheduler._running._free_indices) == num_states
    assert engine.scheduler.stats().num_preemptions > 0


def test_ids_that_a_grammar_forces(tmp_path: Path) -> None:
    """Forced ids are computed as one chunk, with the bits of one-by-one computation."""
    vocab_size = json.loads((demo() / "config.json").read_text())["vocab_size"]
    make_checkpoint(tmp_path, FAMILY, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo() / name, tmp_path)
    grammar = compile_grammar(choice=["unconditionally yes, and without a doubt", "never in all these years"])
    requests = [
        constrained(number, grammar, "x = 1\n" * (1 + number), max_tokens=40, logprobs=1) for number in range(4)
    ]
    engine = make_engine(tmp_path, dtype="float32")
    expected = generate(make_engine(tmp_path, dtype="float32", jump_forward=False), requests)
    assert_equal(generate(engine, requests), expected)
    assert engine.scheduler.stats().num_forced_tokens > 0


@pytest.mark.parametrize("family", mostly_slow(HYBRIDS, ["qwen3_next"]))
@pytest.mark.parametrize(
    "how",
    [
        {"tensor": 2},
        {"tensor": 3},
        {"tensor": 4},  # key heads on several ranks
        {"tensor": 7},  # a rank without heads
        {"tensor": 2, "split": (1, 2)},
        {"pipeline": 3},  # stages without any KV
        {"tensor": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_several_ranks(family: str, how: dict[str, object], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    requests = [
        EngineCoreRequest(id=n, prompt_ids=PROMPT[n:], sampling=Sampling(max_tokens=8, seed=0)) for n in (0, 30, 44)
    ]
    expected = generate(make_engine(tmp_path, block_size=8), requests)
    assert_equal(generate(make_engine(tmp_path, block_size=8, **how), requests), expected, is_exact=False)


@pytest.mark.parametrize(("pair", "option", "message"), REFUSED_OPTIONS)
def test_what_cannot_work_is_refused_by_name(pair: str, option: str, message: str, directory: Path) -> None:
    with pytest.raises(OptionError) as raised:
        make_engine(directory, **{option: OPTIONS[option]})
    assert str(raised.value) == message


def test_events_of_the_prefix_cache_are_refused_by_name(directory: Path) -> None:
    with pytest.raises(
        OptionError, match=r"^--kv-events-config: this model has linear attention, and the events do not"
    ):
        make_engine(directory, kv_events_config='{"enable_kv_cache_events": true}')


def test_it_is_no_draft_model(directory: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    speculation = json.dumps({"method": "draft_model", "model": str(directory)})
    with pytest.raises(
        ModelError, match="Qwen3NextForCausalLM has linear attention, which a draft model must not have"
    ):
        make_engine(tmp_path, speculative_config=speculation)


def test_the_log_says_how_many_states_there_are(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine(directory)
    assert "Prompt lookup is off, because its gain with linear attention has not been measured" in caplog.text
    assert f"one for each running sequence: {engine.kv_cache_config.num_states} of " in caplog.text
    assert f"one for each cached prefix: {engine.kv_cache_config.num_snapshots} of " in caplog.text


def test_stacks_of_experts_and_layers_for_drafts(tmp_path: Path) -> None:
    """As published: one tensor holds all experts of a layer, names are those of the multimodal model, and a layer is
    unused."""
    make_checkpoint(tmp_path, "qwen3_5_moe_text")
    requests = [EngineCoreRequest(id=0, prompt_ids=PROMPT, sampling=SAMPLED)]
    expected = generate(make_engine(tmp_path), requests)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{prefix}.{number}.{name}_proj.weight") for number in range(5)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"mtp.fc.weight": torch.zeros(3, 3)}, path)
    assert_equal(generate(make_engine(tmp_path), requests), expected)
    assert_equal(generate(make_engine(tmp_path, tensor=2), requests), expected, is_exact=False)
