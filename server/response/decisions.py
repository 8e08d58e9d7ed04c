"""Builds the reply of POST /v1/decisions: `schema.decisions.DecisionReply`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from serve_llm.common.types import FinishReason
from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.errors import GenerationFailed
from serve_llm.server.prompt.decisions import Question
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import Json, ResponseMeta, encode_json
from serve_llm.server.response.responses import describe_usage


class DecisionBuilder:
    """Each prompt of the request is a question."""

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        self._meta = meta
        self._questions = msgspec.convert(parsed.echo["questions"], list[Question])

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        """Raises GenerationFailed."""
        answers = []
        for question, delta in zip(self._questions, deltas, strict=True):
            if delta.finish_reason is FinishReason.ABORT or not delta.entries or delta.entries[0].logprobs is None:
                raise GenerationFailed("the generation was aborted")
            answers.append(_answer(question, delta.entries[0].logprobs.top_logprobs))
        usage = describe_usage(counts)
        usage["input_tokens_details"]["cache_write_tokens"] = 0
        return encode_json({"model": self._meta.model, "answers": answers, "usage": usage})


def _answer(question: Question, logprobs: Sequence[float]) -> Json:
    """logprobs: of the options' labels."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) if highest > -math.inf else 1.0 for logprob in logprobs]
    shares = [weight / sum(weights) for weight in weights]
    answer: Json = {"type": question.type, "name": question.name}
    values = [option.value for option in question.options]
    match question.type:
        case "predicate":
            return {**answer, "probability": shares[0]}
        case "choice":
            probabilities: list[Json] = [
                {"value": value, "probability": share} for value, share in zip(values, shares, strict=True)
            ]
            best = shares.index(max(shares))
            return {**answer, "choice": values[best], "confidence": shares[best], "probabilities": probabilities}
        case "score":
            probabilities = [
                {"value": level, "label": values[level], "probability": share} for level, share in enumerate(shares)
            ]
            score = sum(level * share for level, share in enumerate(shares))
            return {**answer, "score": score, "confidence": max(shares), "probabilities": probabilities}
