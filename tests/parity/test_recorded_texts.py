"""Steps of an encoder with one short text are recorded on a CPU (`engine.worker.call_graphs`), with the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.worker.call_graphs import MAX_TEXT_TOKENS, TextRecorder
from support.engine import make_engine
from support.matrix import mostly_slow
from support.pooled import ENCODERS, TOKEN_CLASSIFIERS, compute_vectors, make_pooled_checkpoint, pooling_request

LENGTHS = (1, 2, 9, 40, MAX_TEXT_TOKENS, MAX_TEXT_TOKENS + 1)
SIZES = {"hidden_size": 80}  # with 5 heads, of a size that has compiled attention
USUAL = [
    "BertModel",
    "XLMRobertaForSequenceClassification",
    "ModernBertModel",
    "NomicBertModel",
    "Gemma3TextModel",
    "GteModel",
]


def make_texts(
    directory: Path, architecture: str, **fields: object
) -> tuple[list[EngineCoreRequest], dict[str, object]]:
    """Write a checkpoint. Returns requests, of which each length occurs five times, and the options that it needs."""
    sizes = (
        SIZES if "hidden_size" in ENCODERS.get(architecture, SIZES) and architecture[:4] not in ("Euro", "Gemm") else {}
    )
    vocab_size = make_pooled_checkpoint(directory, architecture, **(sizes or {"head_dim": 16}))
    rng = random.Random(3)
    texts = [
        [rng.randrange(2, vocab_size) for _ in range(length)] for length in rng.sample(LENGTHS * 5, 5 * len(LENGTHS))
    ]
    is_embedder = not architecture.endswith("Classification")
    options: dict[str, object] = {"pooling_type": "cls"} if is_embedder else {}
    return [pooling_request(number, ids, **fields) for number, ids in enumerate(texts)], options


def compute_alone(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[torch.Tensor]:
    """Compute one after the other."""
    return [compute_vectors(engine, [request])[request.id] for request in requests]


def recorder_of(engine: EngineCore) -> TextRecorder:
    found = engine._executor._worker._runner._forward  # type: ignore[attr-defined]
    assert isinstance(found, TextRecorder)
    return found


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("architecture", mostly_slow([*ENCODERS, *TOKEN_CLASSIFIERS], USUAL))
def test_recorded_texts_have_the_bits_of_others(architecture: str, tmp_path: Path) -> None:
    fields = {"pools_tokens": True} if architecture in TOKEN_CLASSIFIERS else {}
    requests, options = make_texts(tmp_path, architecture, **fields)
    expected = compute_alone(make_engine(tmp_path, enforce_eager=True, **options), requests)
    engine = make_engine(tmp_path, **options)
    assert_same_bits(compute_alone(engine, requests), expected)
    assert sorted({length for length, _ in recorder_of(engine)._steps}) == [*LENGTHS[:-1]]
    assert all(recorder_of(engine)._steps.values())


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=["bf16", "int8"]
)
def test_beside_other_steps(options: dict[str, object], tmp_path: Path) -> None:
    """Texts alone, with a vector per token, as second texts of pairs, and several at once."""
    requests, needed = make_texts(tmp_path, "BertModel")
    more = []
    for number, request in enumerate(requests, len(requests)):
        fields = [{"pools_tokens": True}, {"second_text_start": 1}, {}][number % 3]
        more.append(pooling_request(number, request.prompt_ids, **fields))
    requests += random.Random(1).sample(more, len(more))
    eager = make_engine(tmp_path, enforce_eager=True, **options, **needed)
    engine = make_engine(tmp_path, **options, **needed)
    assert_same_bits(compute_alone(engine, requests), compute_alone(eager, requests))
    assert compute_vectors(engine, requests).keys() == {request.id for request in requests}
    assert_same_bits(compute_alone(engine, requests), compute_alone(eager, requests))


def test_encoders_on_several_ranks_are_not_recorded(tmp_path: Path) -> None:
    _, options = make_texts(tmp_path, "BertModel")
    executor = make_engine(tmp_path, pipeline=2, **options)._executor
    assert not any(isinstance(worker._runner._forward, TextRecorder) for worker in executor.workers)  # type: ignore[attr-defined]
