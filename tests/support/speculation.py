"""Drafts for tests of engines, taken from a run without drafts, so that most are accepted with any sampling."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.acceptance_rates import LONGEST
from serve_llm.engine.scheduler.prompt_lookup import NO_DRAFT, NgramDraft
from serve_llm.engine.scheduler.speculation import TextSpeculator
from serve_llm.engine.scheduler.step_costs import StepCosts
from support.engine import Result

NGRAM: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}

STYLES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 1},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 1.0, "choice": 1},
    {"temperature": 1.0, "choice": 2, "max_tokens": 7},
    {"temperature": 0.9, "top_k": 5, "stop_token_ids": tuple(range(0, 300, 9))},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 1, "stop_token_ids": tuple(range(90))},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 4.0}, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 2))},
    {"temperature": 1.0, "bad_words_ids": ((7,), *((number, number + 1) for number in range(300)))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, 331, 3)), "logprobs": 3},
    {"temperature": 1.0, "logprobs": 1, "logprob_token_ids": (3, 9)},
]


def make_requests(vocab_size: int) -> list[EngineCoreRequest]:
    rng = random.Random(5)
    texts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 8, 21, 40)]
    return [
        EngineCoreRequest(
            id=number,
            prompt_ids=texts[number % 4] if number % 3 else texts[number % 4] * 2,
            sampling=Sampling(**({"max_tokens": 20, "seed": 5} | style)),
        )
        for number, style in enumerate(STYLES)
    ]


def make_repetitive(requests: Sequence[EngineCoreRequest]) -> list[EngineCoreRequest]:
    """Repeat a part of each prompt, and make the outputs longer."""
    return [
        msgspec.structs.replace(
            request,
            prompt_ids=[*request.prompt_ids[:12], *range(40, 52)] * 3,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=64, stop_token_ids=()),
        )
        for request in requests
    ]


ARRIVALS = [number // 3 for number in range(len(STYLES))]


def assert_equal(found: dict[int, Result], expected: dict[int, Result]) -> None:
    for number, one in expected.items():
        result = found[number]
        assert (result.token_ids, result.finish_reason) == (one.token_ids, one.finish_reason), f"request {number}"
        assert result.logprobs == one.logprobs, f"request {number}"
        assert result.prompt_logprobs == one.prompt_logprobs


class KnownTexts:
    """Proposes the continuation from the texts, and sometimes something else."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong_every: int) -> None:
        self._texts = [list(text) for text in texts]
        self._wrong_every = wrong_every

    def propose(self, token_ids: Sequence[int], count: int) -> NgramDraft:
        ids = list(token_ids)
        for text in self._texts:
            if len(text) > len(ids) and text[: len(ids)] == ids:
                places = range(len(ids), min(len(text), len(ids) + count))
                drafts = [1 if place % self._wrong_every == 0 else text[place] for place in places]
                # 2: beyond the end, where nothing is accepted
                return NgramDraft([*drafts, *([2] * (count - len(drafts)))], LONGEST)
        return NO_DRAFT

    def finish(self, sequence: object) -> None:
        """Do nothing: there is nothing to release."""


class FreeDrafts(StepCosts):
    """Drafts and draft-model steps that cost nothing, so that drafting does not depend on the machine."""

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> float:
        return 0.0

    def find_draft_cost(self, num_sequences: int) -> float:
        return 0.0


class RisingCost(FreeDrafts):
    """Drafts that cost more in larger batches: with 12 sequences, as much as an id, so that none is worthwhile."""

    def find_draft_cost(self, num_sequences: int) -> float:
        return min(1.0, num_sequences / 12)


def watch_lengths(engine: EngineCore) -> list[tuple[int, int]]:
    """Record, for each choice of drafts from now on, the running sequences and the number of drafts."""
    speculator = engine._speculator
    assert speculator is not None
    choose = speculator.choose
    lengths: list[tuple[int, int]] = []

    def watch(sequence: Any, most: int, num_running: int) -> list[int]:
        drafts = choose(sequence, most, num_running)
        if most:
            lengths.append((num_running, len(drafts)))
        return drafts

    speculator.choose = watch
    return lengths


def draft_freely(engine: EngineCore) -> EngineCore:
    """Draft regardless of the time of the engine's steps."""
    assert engine._speculator is not None
    engine._speculator.costs = FreeDrafts()
    return engine


def draft_from(
    engine: EngineCore, requests: Sequence[EngineCoreRequest], results: Mapping[int, Result], wrong_every: int = 5
) -> EngineCore:
    """Draft from `results`, with a wrong id at every `wrong_every`-th position."""
    texts = [[*request.prompt_ids, *results[request.id].token_ids] for request in requests]
    speculator = draft_freely(engine)._speculator
    assert isinstance(speculator, TextSpeculator)
    speculator.texts.build_proposer = lambda request: KnownTexts(texts, wrong_every)
    return engine


def assert_drafted(engine: EngineCore) -> None:
    """Assert that some drafts were accepted and some were not."""
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, stats


def make_similar(checkpoint: Path, directory: Path, noise: float = 0.05) -> Path:
    """Write a model that often agrees with the checkpoint's: the same model with noise on its weights."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(1)
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
            continue
        tensors = {
            name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, directory / path.name, metadata={"format": "pt"})
    return directory
