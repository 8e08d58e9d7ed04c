"""Features of requests and of engines together: each request gives the same ids and the same logprob bits alone in a
plain engine as in a mixed batch with drafts, forced tokens and cached prefixes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from pathlib import Path

import msgspec
import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import Adapter, EngineCoreRequest
from serve_llm.engine.model.lora_targets import find_served_targets
from serve_llm.engine.structured_output import state
from support.adapters import make_adapter
from support.engine import Result, assert_equal, generate, generate_together, greedy, make_engine, make_engines
from support.grammars import CALL, SCHEMA, VOCAB_SIZE, compile_grammar, constrained, demo
from support.packed_floats import make_packed
from support.pooled import compute_vectors, make_pooled_checkpoint, pooling_request
from support.resolved import resolve_all
from support.speculation import NGRAM, assert_drafted, draft_from
from support.tiny import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
LORA: dict[str, object] = {"enable_lora": True, "max_lora_rank": 4}
OPTIONS: dict[str, object] = LORA | {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "64MiB"}
EMBED: dict[str, object] = {"runner": "generate", "convert": "embed"}
HOWS: dict[str, dict[str, object]] = {
    "one rank": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4-g32"},
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
}
STYLES: list[dict[str, object]] = [
    {"logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.8, "logprobs": 1, "choice": 1},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
]


@pytest.fixture(autouse=True)
def masks_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat masks as cheap even if the machine is busy."""
    monkeypatch.setattr(state, "COSTLY_SECONDS", 1000.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@lru_cache(maxsize=1)
def demo_adapters(root: Path) -> list[Adapter | None]:
    """Return no adapter and two adapters of the demo model."""
    return [None, *(make_adapter(demo(), root / f"demo{seed}", seed=seed, scale=0.1) for seed in (1, 2))]


def make_requests(root: Path) -> list[EngineCoreRequest]:
    """Return a request for each pair of grammar and adapter."""
    grammars = ["", compile_grammar(json=SCHEMA, disable_any_whitespace=True), compile_grammar(grammar=CALL)]
    requests = []
    for grammar in grammars:
        for adapter in demo_adapters(root):
            number = len(requests)
            request = constrained(
                number, grammar, "x = 1\n" * 12, **({"max_tokens": 24} | STYLES[number % len(STYLES)])
            )
            requests.append(msgspec.structs.replace(request, adapter=adapter))
    return requests


def make_calls(first: int, count: int) -> list[EngineCoreRequest]:
    """Return requests for a call, for models with any weights and the demo model's tokenizer."""
    grammar = compile_grammar(grammar=CALL)
    return [
        constrained(number, grammar, "x = 1\n", max_tokens=12, logprobs=1) for number in range(first, first + count)
    ]


@pytest.mark.pairs(
    "speculation + LoRA",
    "speculation + int4",
    "LoRA + grammar",
    "LoRA + n",
    "grammar + int8",
    "grammar + int4",
    "tools + int4",
    "tools + prefix cache",
    "tools + TP",
    "tools + PP",
    "int8 + prefix cache",
    "int8 + logprobs",
    "int8 + n",
    "int4 + prefix cache",
    "int4 + logprobs",
    "int4 + n",
    "prefix cache + TP",
    "prefix cache + PP",
    "logprobs + n",
    "n + TP",
    "n + PP",
)
@pytest.mark.parametrize("how", HOWS)
def test_a_crowd_of_all_kinds(how: str, root: Path) -> None:
    requests = make_requests(root)
    options = OPTIONS | HOWS[how]
    plain = make_engine(demo(), **options, enable_prefix_caching=False, speculative_config="none")
    expected: dict[int, Result] = {}
    for request in requests:
        expected |= generate(plain, [request])
    texts = [tuple(expected[number].token_ids) for number in range(3)]
    assert len(set(texts)) == 3, "the adapters make no difference"
    engine = draft_from(make_engine(demo(), **options, speculative_config=NGRAM), requests, expected)
    for _ in range(2):  # the second time with cached prefixes
        found = generate(engine, requests, [number // 3 for number in range(len(requests))])
        assert_equal(found, expected)
    assert found[0].cached_tokens
    assert_drafted(engine)


def test_forced_tokens_are_those_of_sampling_one_by_one(root: Path) -> None:
    requests = make_requests(root)
    expected = generate(make_engine(demo(), **OPTIONS, jump_forward=False), requests)
    engine = make_engine(demo(), **OPTIONS, speculative_config="none")
    assert_equal(generate(engine, requests), expected, is_exact=False)
    stats = engine.step().stats
    assert stats.num_steps < max(len(result.token_ids) for result in expected.values()) + 3
    assert 0 < stats.num_forced_tokens < sum(len(result.token_ids) for result in expected.values())


@pytest.mark.parametrize("more", [{}, {"speculative_config": NGRAM}], ids=["plain", "drafts"])
def test_preemption(more: dict[str, object], root: Path) -> None:
    requests = make_requests(root)
    options = OPTIONS | {"max_model_len": 144, "max_loras": 1}
    roomy = make_engine(demo(), **options)
    expected = generate(roomy, requests)
    small = make_engine(demo(), **(options | more | {"kv_cache_memory": 9 * roomy.kv_cache_config.block_bytes}))
    if more:
        draft_from(small, requests, expected)
    assert_equal(generate(small, requests), expected)
    assert small.scheduler.stats().num_preemptions > 0


@pytest.mark.pairs("int4 + replay", "prefix cache + replay")
@pytest.mark.parametrize("how", ["one rank", "int4"])
def test_a_replay_goes_on_with_the_same_adapter_and_drafts(how: str, root: Path) -> None:
    requests = make_requests(root)
    options = OPTIONS | HOWS[how]
    expected = generate(make_engine(demo(), **options), requests)
    engine = draft_from(make_engine(demo(), **options, speculative_config=NGRAM), requests, expected)
    for cut in (1, 9):
        begun = [
            msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:cut])
            for request in requests
            if len(expected[request.id].token_ids) > cut
        ]
        for number, result in generate(engine, begun).items():
            assert result.token_ids == expected[number].token_ids[cut:]
    assert_drafted(engine)


@pytest.mark.pairs(
    "LoRA + EP",
    "int8 + EP",
    "int4 + EP",
    "prefix cache + EP",
    "n + EP",
    "tools + EP",
    "fp8 + DP",
    "fp8 + EP",
    "EP + embeddings",
)
@pytest.mark.parametrize("quantization", ["auto", "int8", "int4-g32", "fp8 checkpoint"])
def test_engines_that_share_experts(quantization: str, tmp_path: Path) -> None:
    """Two choices of each prompt; the second prompt of an adapter begins with the first one. A call and a vector run
    alongside in each engine."""
    options = LORA | {"block_size": 8, "quantization": quantization, "tokenizer": str(demo()), **EMBED}
    if quantization == "fp8 checkpoint":
        make_packed(tmp_path, "qwen3_moe", "fp8-block", vocab_size=VOCAB_SIZE)
        checkpoint = tmp_path / "packed"
        del options["quantization"]
    else:
        make_checkpoint(tmp_path / "plain", "qwen3_moe", vocab_size=VOCAB_SIZE)
        checkpoint = tmp_path / "plain"
    adapter = make_adapter(tmp_path / "plain", tmp_path / "adapter", "qwen3_moe")
    style: dict[str, object] = {"temperature": 1.0, "logprobs": 1}
    requests = [
        msgspec.structs.replace(greedy(number, [5, 17, 101, 44] * length, 8, **style, choice=choice), adapter=chosen)
        for number, (chosen, length, choice) in enumerate(product((None, adapter), (4, 6), (0, 1)))
    ]
    requests += make_calls(8, 2)
    requests += [pooling_request(number, [5, 17, 101, 44] * 6) for number in (10, 11)]
    expected = generate(make_engine(checkpoint, **options), requests)
    engines = [
        draft_from(engine, requests, expected)
        for engine in make_engines(checkpoint, tmp_path, 2, **options, speculative_config=NGRAM)
    ]
    shares = [[*requests[:4], *requests[8::2]], [*requests[4:8], *requests[9::2]]]
    for share, found in zip(shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: expected[request.id] for request in share})
        assert found[share[3].id].cached_tokens and found[share[-1].id].vector
    assert_drafted(engines[0])


@pytest.mark.pairs(
    "speculation + embeddings",
    "int8 + embeddings",
    "int4 + embeddings",
    "prefix cache + embeddings",
    "PP + embeddings",
)
@pytest.mark.parametrize("how", HOWS)
def test_vectors_beside_generation(how: str, tmp_path: Path) -> None:
    """Vectors come from the base model, whatever the other requests use."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "qwen3")
    adapter = make_adapter(checkpoint, tmp_path / "adapter")
    prompts = [[5, 17, 101, 44, 9] * count for count in (1, 3, 6)]
    pooled = [pooling_request(100 + number, ids) for number, ids in enumerate(prompts)]
    requests = [
        msgspec.structs.replace(greedy(number, prompts[number], 9, logprobs=1), adapter=adapter if number else None)
        for number in range(3)
    ]
    options: dict[str, object] = EMBED | {"block_size": 8} | HOWS[how]
    expected = generate(make_engine(checkpoint, **options, **LORA, speculative_config="none"), requests)
    vectors = compute_vectors(make_engine(checkpoint, **options), pooled)
    engine = make_engine(checkpoint, **options, **LORA, speculative_config=NGRAM)
    found = generate(draft_from(engine, requests, expected, wrong_every=3), [*requests, *pooled])
    assert_equal({number: found[number] for number in range(3)}, expected)
    assert_drafted(engine)
    assert generate(engine, pooled)[102].cached_tokens == 24
    for number, vector in compute_vectors(engine, pooled).items():  # with cached prefixes
        assert vector.equal(vectors[number])


@pytest.mark.pairs(
    "speculation + fp8",
    "LoRA + fp8",
    "fp8 + prefix cache",
    "fp8 + logprobs",
    "fp8 + n",
    "fp8 + replay",
    "grammar + fp8",
    "tools + fp8",
    "fp8 + embeddings",
)
def test_weights_stored_as_fp8(tmp_path: Path) -> None:
    """Adapters, drafts, choices, calls, vectors, cached prefixes and replays over a checkpoint of 8-bit floats."""
    make_packed(tmp_path, "llama", "fp8-block", vocab_size=VOCAB_SIZE)
    adapter = make_adapter(tmp_path / "plain", tmp_path / "adapter")
    style: dict[str, object] = {"temperature": 1.0, "logprobs": 1}
    requests = [
        msgspec.structs.replace(greedy(number, [5, 17, 101] * 8, 12, **style, choice=choice), adapter=chosen)
        for number, (chosen, choice) in enumerate(product((None, adapter), (0, 1)))
    ]
    requests += make_calls(4, 2)
    options = LORA | {"block_size": 8, "tokenizer": str(demo()), **EMBED}
    expected: dict[int, Result] = {}
    for request in requests:
        plain = make_engine(tmp_path / "packed", **options, enable_prefix_caching=False)
        expected |= generate(plain, [request])
    engine = make_engine(tmp_path / "packed", **options, speculative_config=NGRAM)
    draft_from(engine, requests, expected)
    for _ in range(2):
        found = generate(engine, requests)
        assert_equal(found, expected)
    assert found[3].cached_tokens
    assert_drafted(engine)
    begun = [msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:5]) for request in requests]
    for number, result in generate(engine, begun).items():
        assert result.token_ids == expected[number].token_ids[5:]
    vectors = compute_vectors(engine, [pooling_request(number, [5, 17, 101] * 8) for number in (10, 11)])
    plain = make_engine(tmp_path / "packed", **options, enable_prefix_caching=False)
    assert vectors[10].equal(vectors[11])
    assert vectors[10].equal(compute_vectors(plain, [pooling_request(10, [5, 17, 101] * 8)])[10])


def test_models_that_return_vectors_only(tmp_path: Path) -> None:
    make_pooled_checkpoint(tmp_path, "Qwen3Model")
    with pytest.raises(OptionError, match=r"^--speculative-config: this model returns vectors and generates no text"):
        make_engine(tmp_path, speculative_config=NGRAM)
    with pytest.raises(OptionError, match=r"^--enable-lora cannot be combined with --runner pooling: only models"):
        make_engine(tmp_path, runner="pooling", **LORA)
    config, spec, weights = resolve_all(make_options(str(tmp_path), **LORA), str(tmp_path), read_config(tmp_path))
    with pytest.raises(OptionError, match="generates no text, and only models that do take adapters"):
        find_served_targets(config, spec, weights)
