"""With and without drafts: the same ids and the same logprob bits, however they are sampled.

Drafts are taken from a run without drafts, with some wrong ones, so that drafts of sampled texts are accepted too; some
tests use prompt lookup.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.structured_output import state
from serve_llm.engine.worker.input_batch import HostInputs
from support.engine import Result, generate, generate_together, make_engine, make_engines
from support.gpu_path import graphs_of, make_gpu_engine
from support.grammars import CALL, EOS, VOCAB_SIZE, compile_grammar, constrained, demo, ids_of
from support.matrix import mostly_slow
from support.speculation import (
    ARRIVALS,
    NGRAM,
    RisingCost,
    assert_drafted,
    assert_equal,
    draft_freely,
    draft_from,
    make_requests,
    watch_lengths,
)
from support.tiny import FAMILIES, HYBRIDS, make_checkpoint

ON: dict[str, object] = {"speculative_config": NGRAM, "block_size": 8}
OFF: dict[str, object] = {"speculative_config": "none", "block_size": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def case(family: str, root: Path, **overrides: object) -> tuple[Path, list[EngineCoreRequest]]:
    directory = root / family
    return directory, make_requests(make_checkpoint(directory, family, **overrides))


FEW = ["llama", "mistral", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "gpt_oss"]


@pytest.mark.pairs("speculation + prefix cache", "speculation + logprobs", "speculation + n")
@pytest.mark.parametrize(
    "family", mostly_slow([family for family in FAMILIES if family not in HYBRIDS], ["llama", "mixtral", "deepseek_v3"])
)
def test_every_family(family: str, root: Path) -> None:
    directory, requests = case(family, root)
    expected = generate(make_engine(directory, **OFF), requests, ARRIVALS)
    engine = draft_from(make_engine(directory, **ON), requests, expected)
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    assert_drafted(engine)
    again = [
        EngineCoreRequest(id=request.id, prompt_ids=request.prompt_ids, sampling=request.sampling)
        for request in requests
    ]
    assert_equal(generate(engine, again), expected)  # prefixes are cached, including accepted drafts


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "chunks": {"max_num_batched_tokens": 9},
    "no prefix cache": {"enable_prefix_caching": False},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "few at a time": {"max_num_seqs": 2},
}


@pytest.mark.pairs("speculation + int8", "speculation + TP", "speculation + PP")
@pytest.mark.parametrize("family", mostly_slow(["llama", "mistral"], ["llama"]))
@pytest.mark.parametrize("how", HOWS)
def test_every_way_to_compute(how: str, family: str, root: Path) -> None:
    directory, requests = case(family, root)
    expected = generate(make_engine(directory, **(OFF | HOWS[how])), requests)
    engine = draft_from(make_engine(directory, **(ON | HOWS[how])), requests, expected)
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    assert_drafted(engine)


TEN = ["llama", "mistral", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3", "phi3", "cohere2"]
RANKS: dict[str, dict[str, object]] = {"one rank": {}, "two ranks": {"tensor": 2}, "two stages": {"pipeline": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", TEN)
def test_ten_families(family: str, ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled requests, three choices of a prompt, logprobs, and calls that a grammar requires."""
    monkeypatch.setattr(state, "COSTLY_SECONDS", 1000.0)
    requests = make_requests(make_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE))
    grammar = compile_grammar(grammar=CALL)
    requests += [
        constrained(number, grammar, "x = 1\n", max_tokens=12, logprobs=1, temperature=number % 2)
        for number in range(100, 104)
    ]
    for choice in range(3):
        sampling = Sampling(max_tokens=12, seed=4, temperature=1.0, choice=choice, logprobs=1)
        requests.append(EngineCoreRequest(id=200 + choice, prompt_ids=list(range(9, 40)), sampling=sampling))
    how = {"tokenizer": str(demo()), **RANKS[ranks]}
    expected = generate(make_engine(tmp_path, **OFF, **how), requests)
    engine = draft_from(make_engine(tmp_path, **ON, **how), requests, expected)
    assert_equal(generate(engine, requests), expected)
    assert_drafted(engine)
    adaptive = draft_from(make_engine(tmp_path, **ON, **how), requests, expected, wrong_every=3)
    check_adaptive(adaptive, requests, expected)


def check_adaptive(engine: EngineCore, requests: list[EngineCoreRequest], expected: dict[int, Result]) -> None:
    """Check that the output is the same if draft lengths follow acceptance and batch size, with no drafts in large
    batches."""
    assert engine._speculator is not None
    engine._speculator.costs = RisingCost()
    lengths = watch_lengths(engine)
    assert_equal(generate(engine, requests), expected)  # all at once
    assert_equal(generate(engine, requests, [6 * number for number in range(len(requests))]), expected)
    assert_drafted(engine)
    assert {length for num_running, length in lengths if num_running >= 12} == {0}
    assert len({length for num_running, length in lengths if num_running < 12}) > 2


@pytest.mark.parametrize("family", mostly_slow(["llama", "mixtral"], ["llama"]))
def test_lengths_that_adapt(family: str, root: Path) -> None:
    directory, requests = case(family, root)
    expected = generate(make_engine(directory, **OFF), requests)
    check_adaptive(draft_from(make_engine(directory, **ON), requests, expected, wrong_every=3), requests, expected)


@pytest.mark.pairs("speculation + EP")
def test_engines_that_share_experts(root: Path, tmp_path: Path) -> None:
    directory, requests = case("mixtral", root)
    expected = generate(make_engine(directory, **OFF), requests)
    engines = [draft_from(engine, requests, expected) for engine in make_engines(directory, tmp_path, 2, **ON)]
    shares = [requests[::2], requests[1::2]]
    for engine, share, found in zip(engines, shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: expected[request.id] for request in share})
        assert_drafted(engine)


def test_preemption(root: Path) -> None:
    directory, requests = case("mistral", root)
    options = {"max_model_len": 112, "max_num_batched_tokens": 30}
    roomy = make_engine(directory, **(OFF | options))
    expected = generate(roomy, requests)
    memory = (roomy.kv_cache_config.blocks_per_request(112, 30) + 6) * roomy.kv_cache_config.block_bytes
    small = make_engine(directory, **(ON | options), kv_cache_memory=memory)
    assert_equal(generate(draft_from(small, requests, expected), requests, ARRIVALS), expected)
    assert_drafted(small)
    assert small.scheduler.stats().num_preemptions > 0


@pytest.mark.pairs("speculation + replay")
def test_a_replayed_request_continues_with_drafts(root: Path) -> None:
    directory, requests = case("llama", root)
    expected = generate(make_engine(directory, **OFF), requests)
    engine = draft_from(make_engine(directory, **ON), requests, expected)
    for cut in (1, 6, 19):
        begun = [
            EngineCoreRequest(
                id=request.id,
                prompt_ids=request.prompt_ids,
                output_ids=expected[request.id].token_ids[:cut],
                sampling=request.sampling,
            )
            for request in requests
            if len(expected[request.id].token_ids) > cut
        ]
        for number, result in generate(engine, begun).items():
            assert result.token_ids == expected[number].token_ids[cut:]
            assert result.logprobs == expected[number].logprobs[cut:]
    assert_drafted(engine)


def test_longer_than_the_short_rope_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.9],
        "long_factor": [1.2, 1.9, 3.0, 4.5, 7.0],
    }
    make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=50)
    requests = make_requests(331)
    expected = generate(make_engine(tmp_path, **OFF), requests)
    assert any(50 < len(r.prompt_ids) + len(expected[r.id].token_ids) and len(r.prompt_ids) < 50 for r in requests)
    engine = draft_from(make_engine(tmp_path, **ON), requests, expected)
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    assert_drafted(engine)


def test_steps_in_flight_and_captured_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, a sequence with drafts waits for its ids, and its rows are part of a captured step."""
    directory, requests = case("llama", root)
    expected = generate(make_gpu_engine(directory, monkeypatch, **OFF), requests)
    engine = draft_from(make_gpu_engine(directory, monkeypatch, **ON), requests, expected)
    graphs = graphs_of(engine)
    compute_logits = graphs.logits
    sizes: list[int] = []

    def watched_logits(arrays: HostInputs, received: torch.Tensor | None) -> torch.Tensor:
        sizes.append(len(arrays.ids))
        return compute_logits(arrays, received)

    monkeypatch.setattr(graphs, "logits", watched_logits)
    found = generate(engine, requests)
    for number, one in expected.items():
        result = found[number]
        assert (result.token_ids, result.finish_reason) == (one.token_ids, one.finish_reason), f"request {number}"
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(
            [entry.logprob for entry in one.logprobs], abs=1e-4
        )
    assert_drafted(engine)
    assert max(sizes) > len(requests)


COPY = 'def area(width, height):\n    """The area of a rectangle."""\n    return width * height\n\n\n'


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prompt_lookup_with_the_demo_model(dtype: str) -> None:
    options: dict[str, object] = {"dtype": dtype, "max_model_len": 512}
    prompts = [COPY + COPY[:40], "import os\nimport sys\n" * 3, "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"]
    styles = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}, {"temperature": 0.7}, {"temperature": 1.0}]
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=ids_of(prompts[number % 3]),
            sampling=Sampling(max_tokens=60, seed=number, stop_token_ids=(EOS,), **styles[number % 4]),
        )
        for number in range(12)
    ]
    expected = generate(make_engine(demo(), **options, speculative_config="none"), requests)
    engine = draft_freely(make_engine(demo(), **options, speculative_config="ngram"))
    assert_equal(generate(engine, requests), expected)
    assert_drafted(engine)


def test_prompt_lookup_saves_steps_of_a_text_that_repeats_itself() -> None:
    request = EngineCoreRequest(
        id=1,
        prompt_ids=ids_of("0, 1, 0, 1, 0, 1, 0, 1, 0, 1, "),
        sampling=Sampling(max_tokens=60, seed=0, temperature=0.0),
    )
    steps = []
    results = []
    for config in ("none", {"method": "ngram"}):
        engine = make_engine(demo(), speculative_config=config)
        if config != "none":
            draft_freely(engine)
        results.append(generate(engine, [request])[1].token_ids)
        steps.append(engine.step().stats.num_steps)
    assert results[0] == results[1]
    assert steps[0] == 60 and steps[1] < 50, "the text, and how often it repeats itself, depends on the processor"
