"""Records which features a test uses together, from the engines that it builds and the requests that it sends.

A test with the marker `pairs` fails unless each pair was used: both features in an engine and one of its requests.
docs/features.md is made from these markers, so that it cannot name a test that does something else.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from serve_llm import LLM
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import parse_args
from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.config import Config
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.running import RunningSequences
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.server.dialects import grammar
from serve_llm.server.engines.replicas import Replicas
from support.registered import DAEMONS, ENGINES

VECTOR_PATHS = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v1/rerank", "/v1/score")
SOURCES = {"ngram": "speculation", "draft_model": "draft model", "eagle3": "draft head", "mtp": "draft head"}
HYBRIDS = ("qwen3_next", "qwen3_5")  # model types with linear attention begin with these
CALL_MARK = "tool_call"  # in the grammar of a call
SHARED_CHARACTERS = 64  # characters of JSON shared by two prompts; with fewer, they may share no block


def _list_engine_features(config: Config | Options, tensor: int, pipeline: int, engines: int) -> Iterable[str]:
    name = config.directory if isinstance(config, Config) else config.model
    quantization = config.quantization
    if quantization == "int8":
        yield "int8"
    if quantization.startswith("int4"):
        yield "int4"
    path = Path(name) / "config.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    if quantization == "fp8" or _has_fp8(stored.get("quantization_config", {})):
        yield "fp8"
    if str(stored.get("model_type")).startswith(HYBRIDS):
        yield "linear attention"
    if tensor > 1:
        yield "TP"
    if pipeline > 1:
        yield "PP"
    if engines > 1:
        yield "DP"
    if config.enable_expert_parallel:
        yield "EP"
    if config.kv_offload_memory is not None:
        yield "KV offload"


def _has_fp8(config: Any) -> bool:
    """Return whether a part of a quantization_config describes fp8 weights."""
    if not isinstance(config, dict):
        return False
    if "fp8" in str(config.get("quant_method")) or (config.get("type") == "float" and config.get("num_bits") == 8):
        return True
    return any(map(_has_fp8, config.values()))


def _list_request_features(request: EngineCoreRequest) -> Iterable[str]:
    sampling = request.sampling
    if request.adapter is not None:
        yield "LoRA"
    if sampling.grammar:
        yield "grammar"
    if CALL_MARK in sampling.grammar:
        yield "tools"
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        yield "logprobs"
    if sampling.choice:
        yield "n"
    if request.output_ids:
        yield "replay"
    if request.pooling:
        yield "embeddings"


def _list_body_features(path: str, body: dict[str, Any], options: Options) -> Iterable[str]:
    names = options.served_model_name or (options.model,)
    if options.enable_lora and body.get("model", names[0]) not in names:
        yield "LoRA"
    if body.get("response_format") or body.get("structured_outputs"):
        yield "grammar"
    if body.get("tools"):
        yield "tools"
    if body.get("logprobs") or body.get("top_logprobs") or body.get("prompt_logprobs"):
        yield "logprobs"
    if (body.get("n") or 1) > 1:
        yield "n"
    if path in VECTOR_PATHS:
        yield "embeddings"


class _Context:
    """An engine, or a set of them, and what its requests use."""

    def __init__(self, features: Iterable[str]) -> None:
        self.features = set(features)
        self.requests: set[frozenset[str]] = set()

    def find_pairs(self) -> set[frozenset[str]]:
        found = set()
        for request in self.requests:
            found |= {frozenset(pair) for pair in itertools.combinations(self.features | request, 2)}
        return found


class Observer:
    """A context manager that records what the test does inside it."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._engines: dict[int, tuple[EngineCore, _Context]] = {}  # by the id of its running sequences
        self._offline: dict[int, _Context] = {}  # by the id of its replicas
        self._replicas: list[Any] = []  # kept alive, so that their ids are not reused
        self._servers: dict[str, _Context] = {}  # by port
        self._prompts: dict[str, set[str]] = {}  # beginnings of prompts, by port
        self._draft_counts: dict[int, int] = {}

    def __enter__(self) -> Observer:
        self._wrap(RunningSequences, "admit", self._see_admission)
        self._wrap(Replicas, "submit_many", self._see_submission)
        self._wrap(Replicas, "drop_lost", self._see_loss)
        self._wrap(http.client.HTTPConnection, "request", self._see_call)
        self._wrap(os, "kill", self._see_kill)
        for engine in ENGINES:
            self._draft_counts[id(engine.scheduler._running)] = engine.scheduler.stats().num_draft_tokens
        for kind in (httpx2.Client, httpx2.AsyncClient):  # the openai client's
            self._wrap(kind, "send", self._see_httpx)
        self._wrap(grammar._TurnWriter, "write", self._see_turn)
        self._wrap(LLM, "generate", self._see_offline)
        self._wrap(LLM, "chat", self._see_offline)
        self._wrap(LLM, "embed", self._see_offline)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrap(self, owner: Any, name: str, see: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            see(*arguments, **named)
            return original(*arguments, **named)

        self._patch.setattr(owner, name, call)

    def find_pairs(self) -> set[frozenset[str]]:
        """Return the pairs that have been used so far."""
        contexts = [*self._offline.values(), *self._servers.values()]
        for engine, context in self._engines.values():
            drafts = self._draft_counts.get(id(engine.scheduler._running), 0)
            if engine.scheduler.stats().num_draft_tokens > drafts:
                assert ENGINES[engine].config.speculation is not None
                context.features.add(SOURCES[ENGINES[engine].config.speculation.method])
            if engine.scheduler.stats().num_lookup_draft_tokens:
                context.features.add("speculation")
            contexts.append(context)
        return set().union(*(context.find_pairs() for context in contexts))

    def _see_admission(self, running: RunningSequences, sequence: Sequence, num_cached: int, _: float) -> None:
        if id(running) not in self._engines:
            engine = next((one for one in ENGINES if one.scheduler._running is running), None)
            if engine is None:
                return
            built = ENGINES[engine]
            sizes = built.tensor, built.pipeline, built.config.data_parallel_size
            self._engines[id(running)] = engine, _Context(_list_engine_features(built.config, *sizes))
        features = set(_list_request_features(sequence.request))
        if num_cached:
            features.add("prefix cache")
        self._engines[id(running)][1].requests.add(frozenset(features))

    def _see_offline(self, llm: Any, *_: object, **__: object) -> None:
        if id(llm._replicas) in self._offline:
            return
        self._replicas.append(llm._replicas)
        self._offline[id(llm._replicas)] = _Context(self._list_option_features(llm._options))

    def _list_option_features(self, options: Options) -> Iterable[str]:
        sizes = options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size
        yield from _list_engine_features(options, *sizes)
        if options.speculation is not None:
            yield SOURCES[options.speculation.method]
        if options.nnodes > 1:
            yield "several hosts"

    def _find_replicas(self, replicas: Any) -> _Context:
        if id(replicas) not in self._offline:
            self._replicas.append(replicas)
            self._offline[id(replicas)] = _Context(["DP"] if len(replicas.engines) > 1 else [])
        return self._offline[id(replicas)]

    def _see_submission(self, replicas: Any, pairs: Iterable[tuple[EngineCoreRequest, Any]]) -> None:
        for request, _ in pairs:
            self._find_replicas(replicas).requests.add(frozenset(_list_request_features(request)))

    def _see_turn(self, writer: Any, _: bool, content: str | None) -> None:
        if writer._tools and content is not None:
            self._servers.setdefault("", _Context([])).requests.add(frozenset({"grammar", "tools"}))

    def _see_loss(self, replicas: Any, *_: object) -> None:
        self._find_replicas(replicas).features.add("replay")

    def _see_call(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, *_: Any, **__: Any
    ) -> None:
        if method == "POST" and body:
            self._see_body(str(connection.port), path, body)

    def _see_httpx(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        if request.method == "POST":
            self._see_body(str(request.url.port), request.url.path, request.read())

    def _see_body(self, port: str, path: str, content: bytes | str) -> None:
        arguments = next((given for daemon, given in DAEMONS.items() if str(urlsplit(daemon.url).port) == port), None)
        if arguments is None:
            return
        options = parse_args(list(arguments), {})
        context = self._servers.setdefault(port, _Context(self._list_option_features(options)))
        body = json.loads(content)
        features = set(_list_body_features(path, body, options))
        prompt = json.dumps(body.get("prompt", body.get("messages")))[:SHARED_CHARACTERS]
        known = self._prompts.setdefault(port, set())
        if len(prompt) == SHARED_CHARACTERS and (prompt in known or (body.get("n") or 1) > 1):
            features.add("prefix cache")
        known.add(prompt)
        context.requests.add(frozenset(features))

    def _see_kill(self, _: int, number: int) -> None:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            return
        for context in self._servers.values():
            context.features.add("replay")


def find_missing(pairs: Iterable[str], seen: set[frozenset[str]]) -> list[str]:
    """Return the pairs, written "LoRA + TP", that were not used."""
    return [pair for pair in pairs if frozenset(pair.split(" + ")) not in seen]
