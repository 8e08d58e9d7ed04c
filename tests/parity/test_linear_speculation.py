"""Drafts for models with linear attention: the same ids and the same logprob bits as without drafts.

A rejected draft must leave no trace in a sequence's state; see `kernels.delta_rule`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.scheduler import speculation
from serve_llm.engine.structured_output import state
from serve_llm.kernels import registry
from support.eagle import Served, build_head, write_head
from support.engine import Result, generate, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import CALL, VOCAB_SIZE, compile_grammar, constrained, demo
from support.matrix import mostly_slow
from support.mtp import make_mtp_checkpoint
from support.speculation import (
    ARRIVALS,
    NGRAM,
    assert_drafted,
    assert_equal,
    draft_freely,
    draft_from,
    make_requests,
)
from support.tiny import HYBRIDS, make_checkpoint

OFF: dict[str, object] = {"speculative_config": "none", "block_size": 8, "tokenizer": str(demo())}
ON: dict[str, object] = OFF | {"speculative_config": NGRAM}


class Case:
    """A checkpoint, and requests of every kind with their results without drafts."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory
        self.requests = make_requests(make_checkpoint(directory, family, vocab_size=VOCAB_SIZE))
        grammar = compile_grammar(grammar=CALL)
        self.requests += [
            constrained(number, grammar, "x = 1\n", max_tokens=12, logprobs=1, temperature=number % 2)
            for number in range(100, 104)
        ]
        for choice in range(3):
            sampling = Sampling(max_tokens=12, seed=4, temperature=1.0, choice=choice, logprobs=1)
            self.requests.append(EngineCoreRequest(id=200 + choice, prompt_ids=list(range(9, 40)), sampling=sampling))
        self.expected = self.compute()

    def compute(self, **options: object) -> dict[int, Result]:
        return generate(make_engine(self.directory, **(OFF | options)), self.requests)


@pytest.fixture(autouse=True)
def masks_are_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "COSTLY_SECONDS", 1000.0)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("models") / "qwen3_next", "qwen3_next")


@pytest.mark.parametrize("family", mostly_slow(HYBRIDS, ["qwen3_next"]))
def test_every_family(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family)
    engine = draft_from(make_engine(tmp_path, **ON), case.requests, case.expected)
    for arrivals in (ARRIVALS + [5] * 7, [0] * 21):
        assert_equal(generate(engine, case.requests, arrivals), case.expected)
    assert_drafted(engine)


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "both": {"tensor": 2, "pipeline": 2},
    "chunks": {"max_num_batched_tokens": 9},
    "few at a time": {"max_num_seqs": 2},
    "int8 weights": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.pairs("speculation + linear attention")
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["two ranks", "two stages", "chunks", "bfloat16"]))
def test_every_way_to_compute(how: str, case: Case) -> None:
    expected = case.compute(**HOWS[how])
    engine = draft_from(make_engine(case.directory, **(ON | HOWS[how])), case.requests, expected)
    assert_equal(generate(engine, case.requests, ARRIVALS + [5] * 7), expected)
    assert_drafted(engine)


def test_preemption(case: Case) -> None:
    """Sequences are recomputed from their first token, in the slots of others."""
    options: dict[str, object] = {"max_model_len": 112, "max_num_batched_tokens": 30}
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=list(range(number, number + 9)),
            sampling=Sampling(max_tokens=70, seed=number, temperature=float(number % 2), logprobs=1),
        )
        for number in range(8)
    ]
    expected = generate(make_engine(case.directory, **OFF, **options), requests)
    cache = make_engine(case.directory, **ON, **options).kv_cache_config
    memory = replace(cache, num_blocks=cache.blocks_per_request(112, 30) + 6).num_bytes
    small = make_engine(case.directory, **ON, **options, kv_cache_memory=memory)
    assert_equal(generate(draft_from(small, requests, expected), requests), expected)
    assert_drafted(small)
    assert small.scheduler.stats().num_preemptions > 0


def test_a_replayed_request_continues_with_drafts(case: Case) -> None:
    engine = draft_from(make_engine(case.directory, **ON), case.requests, case.expected)
    for cut in (1, 6, 11):
        begun = [
            msgspec.structs.replace(request, output_ids=case.expected[request.id].token_ids[:cut])
            for request in case.requests
            if len(case.expected[request.id].token_ids) > cut
        ]
        for number, result in generate(engine, begun).items():
            assert result.token_ids == case.expected[number].token_ids[cut:]
            assert result.logprobs == case.expected[number].logprobs[cut:]
    assert_drafted(engine)


def test_as_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences without drafts run ahead. GPU kernels, which read lengths on the device, are tested on their own."""
    how: dict[str, Any] = {"enforce_eager": True, "kernels": registry.PORTABLE}
    plain = make_gpu_engine(case.directory, monkeypatch, **OFF, **how)
    expected = generate(plain, case.requests)
    engine = make_gpu_engine(case.directory, monkeypatch, **ON, **how)
    found = generate(draft_from(engine, case.requests, expected), case.requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }
    assert_drafted(engine)


@pytest.mark.pairs("draft model + linear attention")
def test_drafts_of_a_small_model(case: Case, tmp_path: Path) -> None:
    """A draft model has attention in all layers; here it guesses at random, so most drafts are rejected."""
    make_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE)
    method = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    engine = draft_freely(make_engine(case.directory, **(OFF | {"speculative_config": method})))
    assert_equal(generate(engine, case.requests, ARRIVALS + [5] * 7), case.expected)
    assert engine.scheduler.stats().num_draft_tokens > 50


@pytest.mark.pairs("draft head + linear attention")
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["two ranks", "two stages", "bfloat16"]))
def test_drafts_of_the_mtp_layer(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)  # drafts of a random layer are wrong
    make_mtp_checkpoint(tmp_path, "qwen3_next")
    requests = make_requests(331)
    expected = generate(make_engine(tmp_path, **(OFF | HOWS[how])), requests)
    method = {"method": "mtp", "num_speculative_tokens": 3}
    engine = draft_freely(make_engine(tmp_path, **(OFF | HOWS[how] | {"speculative_config": method})))
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    assert engine.scheduler.stats().num_draft_tokens > 50


def test_drafts_of_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)
    make_checkpoint(tmp_path / "model", "qwen3_next")
    head = write_head(build_head(Served(tmp_path / "model"), 97), tmp_path / "head")
    requests = make_requests(331)
    expected = generate(make_engine(tmp_path / "model", **OFF), requests)
    method = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    engine = draft_freely(make_engine(tmp_path / "model", **(OFF | {"speculative_config": method})))
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    assert engine.scheduler.stats().num_draft_tokens > 50
