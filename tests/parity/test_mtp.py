"""With and without the drafts of an MTP layer: the same ids and the same bits of their log-probabilities. The layer's
drafts must be those of a plain implementation.

The layer was trained on the tiny model's outputs, so that many drafts are right and some are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.types import Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.scheduler import speculation
from support.adapter_files import describe
from support.adapters import make_adapter
from support.drafts import check_head, record_guesses
from support.engine import generate, generate_together, make_engine, make_engines
from support.gpu_path import make_gpu_engine
from support.matrix import mostly_slow
from support.mtp import NUM_LAYERS, make_mtp_checkpoint, train, write_mtp_checkpoint
from support.packed_floats import pack_checkpoint
from support.pooled import compute_vectors, pooling_request
from support.quantised import is_linear
from support.speculation import ARRIVALS, assert_equal, draft_freely, make_requests
from support.tiny import HYBRIDS

OFF: dict[str, object] = {"speculative_config": "none", "block_size": 8}
ON: dict[str, object] = OFF | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
FAMILIES = ["deepseek_v3", "glm4_moe", *HYBRIDS]


class Case:
    """A checkpoint with an MTP layer, and requests."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory
        layer = make_mtp_checkpoint(directory, family)
        self.requests = make_requests(331)
        self.expected = generate(make_engine(directory, **OFF), self.requests)
        texts = [[*one.prompt_ids, *self.expected[one.id].token_ids] for one in self.requests]
        train(layer, [text for text in texts if len(text) > 2])
        write_mtp_checkpoint(layer, directory)


@pytest.fixture(scope="module", params=mostly_slow(FAMILIES, ["deepseek_v3", "qwen3_next"]))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("models") / "deepseek_v3", "deepseek_v3")


HOWS_TO_GUESS: dict[str, dict[str, object]] = {
    "alone": {},
    "chunks": {"max_num_batched_tokens": 9},
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
}


@pytest.mark.parametrize("how", mostly_slow(HOWS_TO_GUESS, ["alone", "two ranks"]))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["deepseek_v3", "qwen3_next"]))
def test_its_guesses_are_those_of_a_plain_implementation(
    family: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)  # drafts of a random layer are wrong
    layer = make_mtp_checkpoint(tmp_path, family)
    engine = draft_freely(make_engine(tmp_path, **ON, **HOWS_TO_GUESS[how], dtype="float32"))
    found = record_guesses(engine)
    for number, prompt in enumerate([[5, 17, 101], list(range(3, 300, 4)), [7]]):
        sampling = Sampling(max_tokens=24, seed=0, temperature=0.0)
        generate(engine, [EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling)])
    compared = 0
    for ids, guesses in found:
        if guesses:
            assert guesses == layer.guess(ids, len(guesses))
            compared += len(guesses)
    assert compared > 100


def test_same_output(case: Case) -> None:
    engine = draft_freely(make_engine(case.directory, **ON))
    for _ in range(2):  # the second time with cached prefixes
        assert_equal(generate(engine, case.requests, ARRIVALS), case.expected)
    check_head(engine)


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "chunks": {"max_num_batched_tokens": 9},
    "few at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("how", mostly_slow(HOWS, ["two stages", "chunks"]))
def test_every_way_to_compute(how: str, deepseek: Case) -> None:
    expected = generate(make_engine(deepseek.directory, **(OFF | HOWS[how])), deepseek.requests)
    engine = draft_freely(make_engine(deepseek.directory, **(ON | HOWS[how])))
    assert_equal(generate(engine, deepseek.requests, ARRIVALS), expected)
    check_head(engine)


@pytest.mark.slow
def test_engines_that_share_experts(deepseek: Case, tmp_path: Path) -> None:
    engines = [draft_freely(engine) for engine in make_engines(deepseek.directory, tmp_path, 2, **ON)]
    shares = [deepseek.requests[::2], deepseek.requests[1::2]]
    for engine, share, found in zip(engines, shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: deepseek.expected[request.id] for request in share})
        check_head(engine)


def test_preemption_and_replay(deepseek: Case) -> None:
    options = {"max_model_len": 112, "max_num_batched_tokens": 30}
    roomy = make_engine(deepseek.directory, **(OFF | options))
    expected = generate(roomy, deepseek.requests)
    memory = (roomy.kv_cache_config.blocks_per_request(112, 30) + 6) * roomy.kv_cache_config.block_bytes
    small = draft_freely(make_engine(deepseek.directory, **(ON | options), kv_cache_memory=memory))
    assert_equal(generate(small, deepseek.requests, ARRIVALS), expected)
    check_head(small)
    assert small.scheduler.stats().num_preemptions > 0
    begun = [
        msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:6])
        for request in deepseek.requests
        if len(expected[request.id].token_ids) > 6
    ]
    for number, result in generate(small, begun).items():
        assert result.token_ids == expected[number].token_ids[6:]


def test_as_on_a_gpu(deepseek: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that needs drafts waits for its ids; others run ahead. No step is captured."""
    expected = generate(make_gpu_engine(deepseek.directory, monkeypatch, **OFF, enforce_eager=True), deepseek.requests)
    engine = draft_freely(make_gpu_engine(deepseek.directory, monkeypatch, **ON, enforce_eager=True))
    found = generate(engine, deepseek.requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }
    check_head(engine)


def test_weights_stored_as_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in published DeepSeek-V3 checkpoints, the MTP layer is in blocks too, except for its projection."""
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)
    make_mtp_checkpoint(tmp_path / "plain", "deepseek_v3")
    pack_checkpoint(tmp_path, "fp8-native", lambda name: is_linear(name) and "eh_proj" not in name)
    request = EngineCoreRequest(
        id=1, prompt_ids=list(range(3, 99)), sampling=Sampling(max_tokens=24, seed=0, temperature=0.0, logprobs=0)
    )
    found = {}
    for name in ("plain", "packed"):
        engine = draft_freely(make_engine(tmp_path / name, **ON, dtype="float32"))
        guesses = record_guesses(engine)
        ids = generate(engine, [request])[1].token_ids
        found[name] = ids, guesses
    assert found["plain"] == found["packed"]
    assert sum(len(guesses) for _, guesses in found["packed"][1]) > 20


def add_feed_forward(directory: Path, hidden_size: int, inner_size: int) -> Adapter:
    """Add the last layer's shared experts to an adapter of rank 4. For a family with routed experts, PEFT writes the
    routed ones only together with the shared ones."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    sizes = {"gate": (inner_size, hidden_size), "up": (inner_size, hidden_size), "down": (hidden_size, inner_size)}
    for name, (outputs, inputs) in sizes.items():
        module = f"base_model.model.model.layers.{NUM_LAYERS - 1}.mlp.shared_experts.{name}_proj"
        tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(4, inputs, generator=generator)
        tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(outputs, 4, generator=generator)
    save_file(tensors, path)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ".*_proj"}))
    return describe(directory)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
@pytest.mark.parametrize("how", [{}, {"tensor": 2}], ids=["one rank", "two ranks"])
def test_with_adapters_and_vectors(how: dict[str, object], deepseek: Case, tmp_path: Path) -> None:
    """The last layer computes all tokens, even those that are not needed."""
    make_adapter(deepseek.directory, tmp_path / "adapter", "deepseek_v3")
    adapter = add_feed_forward(tmp_path / "adapter", 60, 37)
    requests = [
        msgspec.structs.replace(request, adapter=adapter if request.id % 2 else None) for request in deepseek.requests
    ]
    pooled = [pooling_request(100 + number, list(range(3, 20 + number))) for number in range(3)]
    options = how | {"enable_lora": True, "runner": "generate", "convert": "embed"}
    expected = generate(make_engine(deepseek.directory, **OFF, **options), requests)
    vectors = compute_vectors(make_engine(deepseek.directory, **OFF, **options), pooled)
    engine = draft_freely(make_engine(deepseek.directory, **ON, **options))
    found = generate(engine, [*requests, *pooled])
    assert_equal({request.id: found[request.id] for request in requests}, expected)
    check_head(engine)
    for number, vector in vectors.items():
        assert vector.equal(compute_vectors(engine, [one for one in pooled if one.id == number])[number])
        assert found[number].vector == vector.numpy().tobytes()


def test_it_saves_steps(case: Case) -> None:
    request = next(one for one in case.requests if one.sampling == Sampling(max_tokens=20, seed=5, temperature=0.0))
    engine = draft_freely(make_engine(case.directory, **ON))
    assert generate(engine, [request])[request.id].token_ids == case.expected[request.id].token_ids
    assert engine.step().stats.num_steps < 15


def test_no_file_of_weights(deepseek: Case) -> None:
    result = generate(make_engine(deepseek.directory, **ON, load_format="dummy"), deepseek.requests[:1])
    assert result[0].token_ids
