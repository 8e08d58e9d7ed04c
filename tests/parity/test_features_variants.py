"""Features together with draft models, EAGLE-3 heads and linear attention: each request gives the same ids and bits in
a plain engine as in a mixed batch. See test_features.py for prompt lookup and other models."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from serve_llm.common.types import Adapter, EngineCoreRequest
from serve_llm.engine.structured_output import state
from support.adapters import make_adapter
from support.eagle import Served, build_head, write_head
from support.engine import assert_equal, generate, generate_together, greedy, make_engine, make_engines
from support.grammars import CALL, VOCAB_SIZE, compile_grammar, constrained, demo
from support.packed_floats import make_packed
from support.pooled import compute_vectors, pooling_request
from support.speculation import draft_freely

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
OPTIONS: dict[str, object] = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "block_size": 8,
    "tokenizer": str(demo()),
    "runner": "generate",
    "convert": "embed",
}
HOWS: dict[str, dict[str, object]] = {
    "one rank": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4-g32"},
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "fp8": {},
}
VECTORS = [pooling_request(number, [5, 17, 101] * 8) for number in (20, 21)]


@pytest.fixture(autouse=True)
def masks_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat masks as cheap even if the machine is busy."""
    monkeypatch.setattr(state, "COSTLY_SECONDS", 1000.0)


class Model(NamedTuple):
    plain: Path
    packed: Path  # with weights of 8-bit floats
    adapter: Adapter

    def find(self, how: str) -> Path:
        return self.packed if how == "fp8" else self.plain


def make_model(root: Path, family: str) -> Model:
    make_packed(root, family, "fp8-block", vocab_size=VOCAB_SIZE)
    return Model(root / "plain", root / "packed", make_adapter(root / "plain", root / "adapter", family))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def sources(llama: Model) -> dict[str, dict[str, object]]:
    """Return the speculative configs. The model is its own draft model."""
    head = write_head(build_head(Served(llama.plain), 97), llama.plain.parent / "head")
    return {
        "draft model": {"method": "draft_model", "model": str(llama.plain), "num_speculative_tokens": 4},
        "head": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4},
    }


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


def make_requests(adapter: Adapter) -> list[EngineCoreRequest]:
    """Return requests: choices of a prompt with and without the adapter, and calls."""
    style: dict[str, object] = {"temperature": 1.0, "logprobs": 1}
    requests = [
        msgspec.structs.replace(greedy(number, [5, 17, 101] * 8, 12, **style, choice=choice), adapter=chosen)
        for number, (chosen, choice) in enumerate(product((None, adapter), (0, 1)))
    ]
    call = compile_grammar(grammar=CALL)
    requests += [constrained(number, call, "x = 1\n", max_tokens=12, logprobs=1) for number in (4, 5)]
    return requests


@pytest.mark.pairs(
    "LoRA + draft model",
    "grammar + draft model",
    "tools + draft model",
    "int8 + draft model",
    "prefix cache + draft model",
    "logprobs + draft model",
    "n + draft model",
    "TP + draft model",
    "replay + draft model",
    "embeddings + draft model",
    "KV offload + draft model",
    "LoRA + draft head",
    "grammar + draft head",
    "tools + draft head",
    "int8 + draft head",
    "prefix cache + draft head",
    "logprobs + draft head",
    "n + draft head",
    "TP + draft head",
    "replay + draft head",
    "embeddings + draft head",
    "KV offload + draft head",
    "int4 + draft model",
    "fp8 + draft model",
    "PP + draft model",
    "int4 + draft head",
    "fp8 + draft head",
    "PP + draft head",
)
@pytest.mark.parametrize("source", ["draft model", "head"])
@pytest.mark.parametrize("how", HOWS)
def test_drafts_of_a_model(how: str, source: str, llama: Model, sources: dict[str, dict[str, object]]) -> None:
    requests = make_requests(llama.adapter)
    options = OPTIONS | HOWS[how]
    plain = make_engine(llama.find(how), **options, enable_prefix_caching=False)
    expected = generate(plain, requests)
    vectors = compute_vectors(plain, VECTORS)
    more = {"kv_offload_memory": "16MiB", "speculative_config": sources[source]}
    engine = draft_freely(make_engine(llama.find(how), **options, **more))
    for _ in range(2):
        found = generate(engine, requests, [number // 2 for number in range(len(requests))])
        assert_equal(found, expected)
    assert found[3].cached_tokens
    begun = [msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:5]) for request in requests]
    for number, result in generate(engine, begun).items():
        assert result.token_ids == expected[number].token_ids[5:]
    for number, vector in compute_vectors(engine, VECTORS).items():
        assert vector.equal(vectors[number])
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens > 0
    assert source == "head" or stats.num_accepted_tokens > 0


@pytest.mark.pairs(
    "LoRA + linear attention",
    "grammar + linear attention",
    "tools + linear attention",
    "logprobs + linear attention",
    "n + linear attention",
    "TP + linear attention",
    "replay + linear attention",
    "embeddings + linear attention",
    "int8 + linear attention",
    "int4 + linear attention",
    "fp8 + linear attention",
    "PP + linear attention",
)
@pytest.mark.parametrize("how", HOWS)
def test_linear_attention(how: str, hybrid: Model) -> None:
    requests = make_requests(hybrid.adapter)
    options = OPTIONS | HOWS[how]
    plain = make_engine(hybrid.find(how), **options)
    expected = {}
    for request in requests:
        expected |= generate(plain, [request])
    vectors = compute_vectors(plain, VECTORS[:1])
    engine = make_engine(hybrid.find(how), **options)
    found = generate(engine, [*requests, *VECTORS], [number // 2 for number in range(len(requests) + len(VECTORS))])
    assert_equal({request.id: found[request.id] for request in requests}, expected)
    begun = [msgspec.structs.replace(request, output_ids=expected[request.id].token_ids[:5]) for request in requests]
    for number, result in generate(engine, begun).items():
        assert result.token_ids == expected[number].token_ids[5:]
    assert compute_vectors(engine, VECTORS)[20].equal(vectors[20])


@pytest.mark.pairs("DP + linear attention", "EP + linear attention")
def test_linear_attention_in_engines_that_share_experts(hybrid: Model, tmp_path: Path) -> None:
    requests = make_requests(hybrid.adapter)
    expected = generate(make_engine(hybrid.plain, **OPTIONS), requests)
    engines = make_engines(hybrid.plain, tmp_path, 2, **OPTIONS)
    shares = [requests[::2], requests[1::2]]
    for share, found in zip(shares, generate_together(engines, shares), strict=True):
        assert_equal(found, {request.id: expected[request.id] for request in share})
