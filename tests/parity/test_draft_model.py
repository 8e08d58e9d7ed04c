"""With and without the drafts of a draft model: the same ids and the same bits of their log-probabilities.

The draft model is the served one with noise on its weights, so that many drafts are right and some are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from serve_llm.cli.plan.draft_model import count_draft_bytes, read_draft_model
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.draft_model.draft_model import DraftModel
from serve_llm.engine.draft_model.resolve import count_cache_bytes
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.speculation import ModelSpeculator
from support.engine import generate, generate_together, make_engine, make_engines
from support.gpu_path import make_gpu_engine
from support.matrix import mostly_slow
from support.registered import ENGINES
from support.speculation import (
    ARRIVALS,
    assert_drafted,
    assert_equal,
    draft_freely,
    make_repetitive,
    make_requests,
    make_similar,
)
from support.tiny import FAMILIES, HYBRIDS, make_checkpoint

OFF: dict[str, object] = {"speculative_config": "none", "block_size": 8}
FEW = ["llama", "mistral"]


def case(family: str, directory: Path, **overrides: object) -> tuple[Path, dict[str, object], list[EngineCoreRequest]]:
    """Return the checkpoint, the options with a draft model, and requests."""
    requests = make_requests(make_checkpoint(directory / "served", family, **overrides))
    draft = make_similar(directory / "served", directory / "draft")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    return directory / "served", OFF | {"speculative_config": config}, requests


def find_draft_model(engine: EngineCore) -> DraftModel:
    assert isinstance(engine._speculator, ModelSpeculator)
    assert isinstance(engine._speculator._proposer, DraftModel)
    return engine._speculator._proposer


def check(engine: EngineCore) -> None:
    """Check that some drafts were right and some wrong, and that the draft model has released everything."""
    assert_drafted(engine)
    sequences = find_draft_model(engine).sequences
    sequences.check_integrity()
    assert not sequences._drafts, "the draft model follows a request that has ended"


@pytest.mark.parametrize("family", mostly_slow([family for family in FAMILIES if family not in HYBRIDS], FEW))
def test_every_family(family: str, tmp_path: Path) -> None:
    directory, on, requests = case(family, tmp_path)
    expected = generate(make_engine(directory, **OFF), requests, ARRIVALS)
    engine = draft_freely(make_engine(directory, **on))
    for _ in range(2):  # the second time with cached prefixes
        assert_equal(generate(engine, requests, ARRIVALS), expected)
    check(engine)


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "chunks": {"max_num_batched_tokens": 9},
    "few at a time": {"max_num_seqs": 2},
}


@pytest.mark.parametrize("how", mostly_slow(HOWS, ["two ranks", "chunks"]))
def test_every_way_to_compute(how: str, tmp_path: Path) -> None:
    directory, on, requests = case("llama", tmp_path)
    expected = generate(make_engine(directory, **(OFF | HOWS[how])), requests)
    engine = draft_freely(make_engine(directory, **(on | HOWS[how])))
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    check(engine)


def split_draft_model(on: dict[str, object], size: int) -> dict[str, object]:
    config = on["speculative_config"]
    assert isinstance(config, dict)
    return on | {"speculative_config": config | {"draft_tensor_parallel_size": size}}


ON_RANKS: dict[str, dict[str, object]] = {
    "ranks": {"tensor_parallel_size": 2},
    "ranks and stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "chunks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 9, "max_num_seqs": 3},
    "int8": {"tensor_parallel_size": 2, "quantization": "int8", "kv_cache_dtype": "int8"},
    "three ranks": {"tensor_parallel_size": 3},
}


@pytest.mark.parametrize("how", mostly_slow(ON_RANKS, ["ranks and stages"]))
@pytest.mark.pairs("TP + draft model")
def test_shards_on_the_ranks(how: str, tmp_path: Path) -> None:
    """They have the size that `plan` predicts, and the text is that without drafts."""
    options = ON_RANKS[how]
    directory, on, requests = case("llama", tmp_path)
    size = int(str(options["tensor_parallel_size"]))
    on = split_draft_model(on, size)
    plain = make_engine(directory, **(OFF | options))
    expected = generate(plain, requests, ARRIVALS)
    plain._executor.close()
    engine = draft_freely(make_engine(directory, **(on | options)))
    for _ in range(2):
        assert_equal(generate(engine, requests, ARRIVALS), expected)
    check(engine)
    layout = ParallelLayout(size, int(str(options.get("pipeline_parallel_size", 1))))
    chosen = make_options(str(directory), **(on | options))
    draft = read_draft_model(chosen, ENGINES[engine].config, read_config(directory))
    least = 0.98 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.9  # other processors pad less
    for tp_rank, shard in enumerate(engine._executor.draft_shards):
        cache_bytes = count_cache_bytes(draft, 0, size, tp_rank)
        planned = count_draft_bytes(draft, 0, layout, layout.rank(layout.pp_size - 1, tp_rank)) - cache_bytes
        assert draft is not None and shard.kv_cache_config.num_bytes >= cache_bytes
        assert least * planned <= shard.weight_bytes <= 1.02 * planned
    assert len(engine._executor.draft_shards) == size
    engine._executor.close()


@pytest.mark.parametrize("how", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one rank", "two ranks", "two stages"])
@pytest.mark.pairs("speculation + draft model")
def test_with_prompt_lookup_where_the_text_repeats_itself(how: dict[str, object], tmp_path: Path) -> None:
    directory, on, requests = case("llama", tmp_path)
    longer = make_repetitive(requests)
    expected = generate(make_engine(directory, **(OFF | how)), longer, ARRIVALS)
    engine = draft_freely(make_engine(directory, **(on | how)))
    assert_equal(generate(engine, longer, ARRIVALS), expected)
    check(engine)
    stats = engine.scheduler.stats()
    assert 0 < stats.num_lookup_accepted_tokens <= stats.num_lookup_draft_tokens < stats.num_draft_tokens


@pytest.mark.pairs("DP + draft model", "EP + draft model")
def test_engines_that_share_experts(tmp_path: Path) -> None:
    directory, on, requests = case("mixtral", tmp_path)
    expected = generate(make_engine(directory, **OFF), requests)
    engines = [draft_freely(engine) for engine in make_engines(directory, tmp_path, 2, **on)]
    shares = [requests[::2], requests[1::2]]
    for engine, share, found in zip(engines, shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: expected[request.id] for request in share})
        check(engine)


def test_preemption_and_replay(tmp_path: Path) -> None:
    directory, on, requests = case("mistral", tmp_path)
    options = {"max_model_len": 112, "max_num_batched_tokens": 30}
    roomy = make_engine(directory, **(OFF | options))
    expected = generate(roomy, requests)
    memory = (roomy.kv_cache_config.blocks_per_request(112, 30) + 6) * roomy.kv_cache_config.block_bytes
    small = draft_freely(make_engine(directory, **(on | options), kv_cache_memory=memory))
    assert_equal(generate(small, requests, ARRIVALS), expected)
    check(small)
    assert small.scheduler.stats().num_preemptions > 0
    begun = [
        msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:6])
        for request in requests
        if len(expected[request.id].token_ids) > 6
    ]
    for number, result in generate(small, begun).items():
        assert result.token_ids == expected[number].token_ids[6:]


@pytest.mark.slow
def test_as_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that needs drafts waits for its ids; others run ahead."""
    directory, on, requests = case("llama", tmp_path)
    expected = generate(make_gpu_engine(directory, monkeypatch, **OFF), requests)
    engine = draft_freely(make_gpu_engine(directory, monkeypatch, **on))
    found = generate(engine, requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }
    check(engine)


def test_a_draft_model_with_few_blocks_and_a_short_context(tmp_path: Path) -> None:
    """The draft model forgets requests for which it has no room, and ignores those that exceed its context."""
    directory, on, requests = case("llama", tmp_path)
    config = tmp_path / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32}))
    engine = draft_freely(make_engine(directory, **on))
    model = find_draft_model(engine)
    assert model._max_model_len == 32
    spare = [model.sequences._pool.allocate() for _ in range(model.sequences._pool.num_free - 8)]
    assert_equal(generate(engine, requests, ARRIVALS), generate(make_engine(directory, **OFF), requests))
    for block in spare:
        model.sequences._pool.release(block)
    check(engine)


def test_it_saves_steps_of_greedy_and_sampled_texts(tmp_path: Path) -> None:
    """With the served model itself as the draft model, every draft is right, whatever the sampling."""
    directory = tmp_path / "served"
    make_checkpoint(directory, "llama")
    config = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 4}
    for temperature in (0.0, 1.0):
        request = EngineCoreRequest(
            id=1, prompt_ids=[5, 17, 101], sampling=Sampling(max_tokens=61, seed=3, temperature=temperature)
        )
        engine = draft_freely(make_engine(directory, speculative_config=config))
        assert generate(engine, [request])[1].token_ids == generate(make_engine(directory), [request])[1].token_ids
        stats = engine.step().stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert stats.num_steps < 20
