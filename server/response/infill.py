"""Responses of /infill in llama.cpp's shape: `schema.infill`."""

from __future__ import annotations

from serve_llm.common.types import FinishReason
from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.errors import RequestError, error_body
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import Json, ResponseMeta, build_metrics, encode_json


class InfillBuilder:
    """Builds the response to one request, which has one choice."""

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        self._meta = meta

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        (delta,) = deltas
        return encode_json(self.describe_end(delta, delta.text, counts))

    def describe_end(self, delta: Delta, content: str, counts: TokenCounts) -> Json:
        """`schema.infill.InfillReply`. delta: the last one."""
        metrics = build_metrics(counts)
        stopping_word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self._meta.model,
            "tokens_predicted": counts.completion,
            "tokens_evaluated": counts.prompt,
            "tokens_cached": counts.cached,
            "truncated": False,
            "stop_type": "word" if stopping_word else _name_stop(delta.finish_reason),
            "stopping_word": stopping_word,
            "timings": {
                "prompt_n": counts.prompt - counts.cached,
                "prompt_ms": metrics["time_to_first_token_ms"],
                "predicted_n": counts.completion,
                "predicted_ms": metrics["generation_time_ms"],
            },
        }


class InfillEncoder:
    """Encodes the events of one stream; there is no [DONE] in llama.cpp's streams."""

    continuous_usage = False
    start_seconds: float | None = None
    ping_seconds: float | None = None

    def __init__(self, builder: InfillBuilder) -> None:
        self._builder = builder
        self._last = Delta(index=0, text="", token_ids=[], entries=[], first=True)

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """Events for new deltas; empty if they hold no text."""
        self._last = deltas[-1]
        return b"".join(_to_line({"index": 0, "content": delta.text, "stop": False}) for delta in deltas if delta.text)

    def encode_ping(self, counts: TokenCounts) -> bytes:
        return b": ping\n\n"

    def encode_end(self, counts: TokenCounts) -> bytes:
        return _to_line(self._builder.describe_end(self._last, "", counts))

    def encode_error(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


def _name_stop(reason: FinishReason | None) -> str:
    if reason is FinishReason.STOP:
        return "eos"
    return "limit" if reason is FinishReason.LENGTH else "none"


def _to_line(event: Json) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"
