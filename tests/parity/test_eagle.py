"""With and without the drafts of an EAGLE-3 head: the same ids and the same bits of their log-probabilities. The head's
drafts must be those of a plain implementation.

The head was trained on the tiny model's outputs, so that many drafts are right and some are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from reference.eagle3 import Head
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.scheduler import speculation
from support.drafts import check_head, find_draft_model, record_guesses
from support.eagle import Served, build_head, train, use_speculators_format, write_head
from support.engine import generate, generate_together, make_engine, make_engines
from support.gpu_path import make_gpu_engine
from support.matrix import mostly_long, mostly_slow
from support.speculation import ARRIVALS, assert_equal, draft_freely, make_repetitive, make_requests
from support.tiny import make_checkpoint

OFF: dict[str, object] = {"speculative_config": "none", "block_size": 8}
FAMILIES = ["llama", "mistral", "mixtral", "gemma3_text", "deepseek_v3"]


class Case:
    """A checkpoint, a head for it, and requests."""

    def __init__(self, root: Path, family: str) -> None:
        self.directory = root / family
        self.requests = make_requests(make_checkpoint(self.directory, family))
        self.expected = generate(make_engine(self.directory, **OFF), self.requests)
        served = Served(self.directory)
        head = build_head(served, 200, std=0.1)
        texts = [[*one.prompt_ids, *self.expected[one.id].token_ids] for one in self.requests]
        train(head, served, [text for text in texts if len(text) > 2])
        self.on = OFF | use(write_head(head, root / f"{family}-head"))


def use(head: Path) -> dict[str, object]:
    return {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(root: Path) -> Case:
    return Case(root, "llama")


@pytest.mark.parametrize("norm_before_residual", mostly_slow([False, True], [True]))
@pytest.mark.parametrize("how", [{}, {"max_num_batched_tokens": 9}, {"tensor": 2}], ids=["", "chunks", "two ranks"])
def test_its_guesses_are_those_of_a_plain_implementation(
    how: dict[str, object], norm_before_residual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)  # drafts of a random head are wrong
    make_checkpoint(tmp_path / "served", "llama", num_hidden_layers=5)
    served = Served(tmp_path / "served")
    head = build_head(served, 97, norm_before_residual=norm_before_residual)
    engine = draft_freely(
        make_engine(tmp_path / "served", **(OFF | how | use(write_head(head, tmp_path / "head"))), dtype="float32")
    )
    found = record_guesses(engine)
    prompts = [[5, 17, 101], list(range(3, 300, 4)), [7]]
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=24, seed=0, temperature=0.0)
        generate(engine, [EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling)])
    compared = 0
    for ids, guesses in found:
        if guesses:
            assert guesses == head.guess(ids, served.states(ids[:-1]), len(guesses))
            compared += len(guesses)
    assert compared > 150


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 1]}, (0, 1, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}}, (1, 2, 4)),
    ],
)
@pytest.mark.parametrize("how", [{}, {"pipeline": 2}], ids=["", "two stages"])
def test_heads_that_name_the_layers(
    how: dict[str, object], config: dict[str, object], layers: tuple[int, ...], tmp_path: Path
) -> None:
    check_other_layers(tmp_path, how, layers, lambda head: head.config.update(config))


def test_the_format_of_speculators(tmp_path: Path) -> None:
    check_other_layers(tmp_path, {}, (1, 2, 4), lambda head: use_speculators_format(head, (1, 2, 4)))


def check_other_layers(
    root: Path, how: dict[str, object], layers: tuple[int, ...], change: Callable[[Head], None]
) -> None:
    """Check that a head trained on the inputs of these layers makes the drafts of a plain implementation, that drafts
    are accepted, and that the output is the same without it. change: keys added to the head's config."""
    requests = make_requests(make_checkpoint(root / "served", "llama", num_hidden_layers=5))
    expected = generate(make_engine(root / "served", **OFF), requests)
    served = Served(root / "served")
    head = build_head(served, 200, std=0.1, norm_before_residual=True)
    texts = [[*one.prompt_ids, *expected[one.id].token_ids] for one in requests]
    train(head, served, [text for text in texts if len(text) > 2], layers)
    plain = Head(head.tensors, head.config, head.embedding)
    change(head)
    engine = draft_freely(make_engine(root / "served", **(OFF | how | use(write_head(head, root / "head")))))
    found = record_guesses(engine)
    assert_equal(generate(engine, requests, ARRIVALS), expected)
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    greedy = next(one for one in requests if one.sampling == Sampling(max_tokens=20, seed=5, temperature=0.0))
    found.clear()
    generate(engine, [greedy])
    compared = [(ids, guesses) for ids, guesses in found if guesses]
    assert compared
    for ids, guesses in compared:
        assert guesses == plain.guess(ids, served.states(ids[:-1], layers), len(guesses))


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_long(FAMILIES, FAMILIES[:3]))
def test_same_output(family: str, root: Path, llama: Case) -> None:
    case = llama if family == "llama" else Case(root, family)
    engine = draft_freely(make_engine(case.directory, **case.on))
    for _ in range(2):  # the second time with cached prefixes
        assert_equal(generate(engine, case.requests, ARRIVALS), case.expected)
    check_head(engine)


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "three stages of two ranks": {"pipeline": 3, "tensor": 2},
    "chunks": {"max_num_batched_tokens": 9},
    "few at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("how", mostly_slow(HOWS, ["two stages", "chunks"]))
def test_every_way_to_compute(how: str, llama: Case) -> None:
    expected = generate(make_engine(llama.directory, **(OFF | HOWS[how])), llama.requests)
    engine = draft_freely(make_engine(llama.directory, **(llama.on | HOWS[how])))
    assert_equal(generate(engine, llama.requests, ARRIVALS), expected)
    check_head(engine)


@pytest.mark.slow
@pytest.mark.pairs("DP + draft head", "EP + draft head")
def test_engines_that_share_experts(tmp_path: Path) -> None:
    case = Case(tmp_path, "mixtral")
    engines = [draft_freely(engine) for engine in make_engines(case.directory, tmp_path, 2, **case.on)]
    shares = [case.requests[::2], case.requests[1::2]]
    for engine, share, found in zip(engines, shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: case.expected[request.id] for request in share})
        check_head(engine)


def test_preemption_and_replay(llama: Case) -> None:
    options = {"max_model_len": 112, "max_num_batched_tokens": 30}
    roomy = make_engine(llama.directory, **(OFF | options))
    expected = generate(roomy, llama.requests)
    memory = (roomy.kv_cache_config.blocks_per_request(112, 30) + 6) * roomy.kv_cache_config.block_bytes
    small = draft_freely(make_engine(llama.directory, **(llama.on | options), kv_cache_memory=memory))
    assert_equal(generate(small, llama.requests, ARRIVALS), expected)
    check_head(small)
    assert small.scheduler.stats().num_preemptions > 0
    begun = [
        msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:6])
        for request in llama.requests
        if len(expected[request.id].token_ids) > 6
    ]
    for number, result in generate(small, begun).items():
        assert result.token_ids == expected[number].token_ids[6:]


def test_as_on_a_gpu(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that needs drafts waits for its ids; others run ahead. No step is captured."""
    expected = generate(make_gpu_engine(llama.directory, monkeypatch, **OFF, enforce_eager=True), llama.requests)
    engine = draft_freely(make_gpu_engine(llama.directory, monkeypatch, **llama.on, enforce_eager=True))
    found = generate(engine, llama.requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }
    check_head(engine)


def test_it_saves_steps(llama: Case) -> None:
    request = next(one for one in llama.requests if one.sampling == Sampling(max_tokens=20, seed=5, temperature=0.0))
    engine = draft_freely(make_engine(llama.directory, **llama.on))
    assert generate(engine, [request])[request.id].token_ids == llama.expected[request.id].token_ids
    assert engine.step().stats.num_steps < 15


def test_a_prompt_whose_start_is_cached(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reuses what it has computed for the same prompt. If there is nothing, it begins after the cached
    part."""
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)  # accept as many drafts each time
    prompt = list(range(3, 300, 3))
    requests = [
        EngineCoreRequest(id=number, prompt_ids=prompt, sampling=Sampling(max_tokens=12, seed=1, temperature=0.0))
        for number in range(3)
    ]
    engine = draft_freely(make_engine(llama.directory, **llama.on))
    model = find_draft_model(engine)
    found = record_guesses(engine)
    first_ids = []
    take_over = model.sequences._begin

    def begin(target: object, first_id: int) -> object:
        draft = take_over(target, first_id)
        first_ids.append(draft.first_id)
        return draft

    model.sequences._begin = begin
    guesses = []
    for request in requests:
        if request.id == 2:  # other requests have taken the head's blocks
            pool = model.sequences._pool
            taken = [pool.allocate() for _ in range(pool.num_free)]
            for block in taken:
                pool.release(block)
        result = generate(engine, [request])[request.id]
        assert result.token_ids == generate(make_engine(llama.directory, **OFF), [request])[request.id].token_ids
        guesses.append([(tuple(ids), tuple(own)) for ids, own in found])
        found.clear()
    assert first_ids == [1, 1, 97]
    assert guesses[0] == guesses[1]
    assert any(own for _, own in guesses[2])


@pytest.mark.pairs("speculation + draft head")
def test_with_prompt_lookup_where_the_text_repeats_itself(llama: Case) -> None:
    requests = make_repetitive(llama.requests)
    engine = draft_freely(make_engine(llama.directory, **llama.on))
    assert_equal(generate(engine, requests), generate(make_engine(llama.directory, **OFF), requests))
    check_head(engine)
    stats = engine.scheduler.stats()
    assert 0 < stats.num_lookup_accepted_tokens <= stats.num_lookup_draft_tokens < stats.num_draft_tokens


def test_few_blocks(llama: Case) -> None:
    """The head forgets requests for which it has no room."""
    engine = draft_freely(make_engine(llama.directory, **llama.on))
    model = find_draft_model(engine)
    spare = [model.sequences._pool.allocate() for _ in range(model.sequences._pool.num_free - 8)]
    assert_equal(generate(engine, llama.requests, ARRIVALS), llama.expected)
    for block in spare:
        model.sequences._pool.release(block)
    check_head(engine)


def test_its_own_embedding(llama: Case, tmp_path: Path) -> None:
    served = Served(llama.directory)
    head = build_head(served, 331)
    write_head(head, tmp_path / "without")
    head.tensors["embed_tokens.weight"] = served.embedding
    write_head(head, tmp_path / "with")
    texts = []
    for name in ("without", "with"):
        engine = draft_freely(make_engine(llama.directory, **(OFF | use(tmp_path / name))))
        found = record_guesses(engine)
        generate(engine, llama.requests[:1])
        texts.append(found)
    assert texts[0] == texts[1] and any(own for _, own in texts[0])


def test_no_file_of_weights(llama: Case) -> None:
    engine = make_engine(llama.directory, **llama.on, load_format="dummy")
    result = generate(engine, llama.requests[:1])
    assert result[0].token_ids


def test_hidden_states_take_the_models_dtype(llama: Case) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        engine = make_engine(llama.directory, **llama.on, dtype=dtype)
        model = find_draft_model(engine)
        seen = []
        take = model.take_hidden_states

        def record(sequence: object, start: int, states: bytes, take: object = take, seen: list[int] = seen) -> None:
            seen.append(len(states))
            take(sequence, start, states)

        model.take_hidden_states = record
        generate(
            engine,
            [
                EngineCoreRequest(
                    id=1, prompt_ids=[1, 2, 3, 4, 5], sampling=Sampling(max_tokens=2, seed=0, temperature=0.0)
                )
            ],
        )
        assert seen[0] == 5 * 3 * 60 * size
        assert model._dtype == getattr(torch, dtype)
