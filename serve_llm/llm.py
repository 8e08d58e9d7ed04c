"""Offline inference: the server's path from text to engine and back, without HTTP.

The engine runs in its own process, as in the daemon. An event loop in a thread talks to it, so that the methods of
`LLM` can be called from anywhere, notebooks included.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from serve_llm.common.errors import EngineError
from serve_llm.common.hub import resolve_model, resolve_tokenizer
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.common.tokenizer_files import load_transformers_tokenizer
from serve_llm.server.adapters.offline import AdapterChoices, expand_adapters
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.engines.supervisor import Supervisor
from serve_llm.server.generate.delta import Delta
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.generate.generation import Generation, Generator
from serve_llm.server.generate.offline import (
    RefusedMethods,
    UseTqdm,
    check_options,
    create_bar,
    run_all,
    run_loop,
)
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt import pooling_jobs
from serve_llm.server.prompt.chat_turn import prepare_turn
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.offline_prompts import ParsedPrompt, Prompt, parse_chats, parse_prompts, set_priorities
from serve_llm.server.prompt.pool import build_grammar_compiler
from serve_llm.server.prompt.pooling_jobs import ValidPoolingRequest
from serve_llm.server.prompt.template import ContentFormat
from serve_llm.server.prompt.validate import TextRequest, check_text, prepare
from serve_llm.server.response.metrics_snapshot import MetricValue, read_metrics
from serve_llm.server.response.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    VectorOutput,
    build_completion,
    build_token_logprobs,
)
from serve_llm.server.response.vectors import compute_probabilities, compute_scores, cut_vector
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import ChatRequest
from serve_llm.server.schema.common import validate_body

T = TypeVar("T")
OutputBuilder = Callable[[ValidPoolingRequest, list[bytes]], VectorOutput]
Message = Mapping[str, Any]
PreparedPrompt = tuple[str | None, TextRequest]  # the prompt's text, None if it was given as ids


class LLM(RefusedMethods):
    """One model. Options are the daemon's, with underscores: LLM("demo", max_model_len="1k").

    Raises ServeError if the model cannot be served. The engine stops on `close`, at the end of a `with` block, when the
    object is collected, and when the program ends.
    """

    def __init__(self, model: str, **options: object) -> None:
        self._options = resolved = make_options(model, **options)
        check_options(resolved)
        with_weights = resolved.load_format == "auto"
        directory = resolve_model(resolved.model, resolved.revision, resolved.download_dir, weights=with_weights)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=run_loop, args=(self._loop,), name="serve-llm", daemon=True)
        thread.start()
        self._supervisor = self._run(_create_supervisor(resolved, str(directory)))
        self._close = weakref.finalize(self, _stop, self._supervisor, self._loop, thread)
        try:
            self._model = ServedModel.load(directory, resolved)
            self._model.log_findings()
            self._run(self._supervisor.start())
            self._replicas = self._supervisor.replicas
            info = self._replicas.model_info
            self._adapters = AdapterRegistry(info, resolved.max_lora_rank, self._model.names, resolved.download_dir)
            self._run(self._adapters.load_all(resolved.lora_modules))
        except BaseException:
            self.close()
            raise
        self._generator = Generator(LocalDispatcher(self._replicas), self._model, resolved.seed)
        # The caller's own process may render and compile anything that the caller provides.
        context = JobContext(self._model, info, resolved.limits, trusts_templates=True, is_worker=True)
        self._context = context._replace(grammars=build_grammar_compiler(context))
        self._num_requests = 0
        self._cache_salt = ""  # requests share cached prefixes with those of equal salt

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: AdapterChoices = None,
        lora: AdapterChoices = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue all prompts together. Returns the outputs in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or any iterable of these.
            A dict may also hold "cache_salt": cached prefixes are shared between equal salts only.
        sampling_params: one for all, or one for each; by default those of the model's generation_config.json.
        lora_request: an adapter for all, or one or None for each: a `LoRARequest`, or the name of an adapter that is
            loaded, by an earlier `LoRARequest` or `lora_modules`; needs enable_lora=True. `lora` is a shorter name.
        priority: one for each prompt; lower values run first.
        Raises InvalidRequest (a ValueError) before anything runs if a prompt or parameter is invalid, AdapterError if
        an adapter cannot be served, GenerationFailed if the engine fails, and EngineError after `close`.
        """
        self._check_open()
        parsed = parse_prompts(prompts)
        params = self._expand_params(len(parsed), sampling_params)
        prepared = [self._prepare(prompt, one) for prompt, one in zip(parsed, params, strict=True)]
        if priority is not None:
            set_priorities([request for _, request in prepared], priority)
        self._add_adapters([request for _, request in prepared], lora_request, lora)
        return self._complete(prepared, use_tqdm)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        lora_request: AdapterChoices = None,
        lora: AdapterChoices = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, with messages and tools as in OpenAI's API.

        chat_template: Jinja source, used instead of the model's own template.
        chat_template_content_format: contents are "string"s, lists of parts ("openai"), or what the template takes.
        lora_request, lora and what is raised: as in `generate`.
        """
        self._check_open()
        conversations = parse_chats(messages)
        expanded = self._expand_params(len(conversations), sampling_params)
        prepared = []
        for conversation, params in zip(conversations, expanded, strict=True):
            fields = {
                "messages": conversation,
                "tools": None if tools is None else [dict(tool) for tool in tools],
                "tool_choice": tool_choice,
                "parallel_tool_calls": parallel_tool_calls,
                "reasoning_effort": reasoning_effort,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "continue_final_message": continue_final_message,
                "chat_template": chat_template,
                "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
            }
            turn = validate_body(ChatRequest, fields).to_turn(params, self._context.limits)
            prepared.append(prepare_turn(replace(turn, content_format=chat_template_content_format), self._context))
        self._add_adapters([request for _, request in prepared], lora_request, lora)
        return self._complete(prepared, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: UseTqdm = True,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterChoices = None,
        lora: AdapterChoices = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of each prompt. Fields as in /v1/embeddings; adapters and errors as in `generate`."""
        fields = {"dimensions": dimensions, "truncate_prompt_tokens": truncate_prompt_tokens}
        bodies = [prompt.to_body() | fields for prompt in parse_prompts(prompts)]

        def build(parsed: ValidPoolingRequest, vectors: list[bytes]) -> EmbeddingOutput:
            return EmbeddingOutput(cut_vector(vectors[0], parsed.dimensions).tolist())

        prepared = self._prepare_pooling(pooling_jobs.embed, bodies, lora_request, lora)
        return self._pool(prepared, build, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: UseTqdm = True,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterChoices = None,
        lora: AdapterChoices = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of each prompt's classes. Adapters and errors are those of `generate`."""
        fields = {"truncate_prompt_tokens": truncate_prompt_tokens}
        bodies = [prompt.to_body() | fields for prompt in parse_prompts(prompts)]
        settings = self._model.vectors

        def build(parsed: ValidPoolingRequest, vectors: list[bytes]) -> ClassificationOutput:
            probs = compute_probabilities(vectors[0], settings.activation)
            return ClassificationOutput(probs, settings.find_label(probs))

        prepared = self._prepare_pooling(pooling_jobs.classify, bodies, lora_request, lora)
        return self._pool(prepared, build, use_tqdm)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: UseTqdm = True,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterChoices = None,
        lora: AdapterChoices = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how well each document matches its query: one query for all, or one for each.

        Adapters and errors are those of `generate`; a list of adapters has one for each document.
        """
        seconds = [documents] if isinstance(documents, str) else list(documents)
        firsts = [queries] if isinstance(queries, str) else list(queries)
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequest(f"{len(firsts)} queries for {len(seconds)} documents", "queries")
        fields = {"truncate_prompt_tokens": truncate_prompt_tokens}
        pairs = zip(firsts, seconds, strict=True)
        bodies = [{"queries": query, "documents": document, **fields} for query, document in pairs]

        def build(parsed: ValidPoolingRequest, vectors: list[bytes]) -> ScoringOutput:
            return ScoringOutput(compute_scores(parsed, vectors, self._model.vectors)[0])

        prepared = self._prepare_pooling(pooling_jobs.score, bodies, lora_request, lora)
        return self._pool(prepared, build, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses by default."""
        return SamplingParams(**self._model.defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers' PreTrainedTokenizerBase, to count tokens or to render a prompt."""
        directory = self._model.directory
        if self._options.tokenizer is not None:
            directory = resolve_tokenizer(self._options.tokenizer, self._options.download_dir)
        return load_transformers_tokenizer(directory)

    def get_metrics(self) -> list[MetricValue]:
        """The metrics of docs/metrics.md as they are now: gauges, counters and histograms."""
        return read_metrics(self._replicas, self._model.names[0], self._options)

    def reset_prefix_cache(self) -> bool:
        """Let later calls share no cached prefixes with earlier ones. Returns True."""
        self._cache_salt = secrets.token_hex(8)
        return True

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expand_params(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        """Return one SamplingParams per prompt. Each is checked again: its fields may have been set since it was
        created."""
        if params is None or isinstance(params, SamplingParams):
            return [msgspec.structs.replace(params or self.get_default_sampling_params())] * num_prompts
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequest("sampling_params must be a SamplingParams, or one for each prompt", "sampling_params")
        if len(params) != num_prompts:
            raise InvalidRequest(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
        return [msgspec.structs.replace(one) for one in params]

    def _check_open(self) -> None:
        if not self._close.alive:
            raise EngineError("this LLM is closed; make a new one")

    def _prepare(self, prompt: ParsedPrompt, params: SamplingParams) -> PreparedPrompt:
        context = self._context
        text = None
        if isinstance(prompt.content, str):
            text = prompt.content
            check_text(text, context.model, context.model_info, params.truncate_prompt_tokens is not None, "prompt")
            ids = context.model.tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = prompt.content
        wanted = params.structured_outputs
        grammar = "" if wanted is None else context.find_grammar(wanted)
        salt = prompt.cache_salt or ""
        return text, prepare([ids], params, context.model, context.model_info, grammar=grammar, cache_salt=salt)

    def _add_adapters(
        self, requests: Sequence[TextRequest], lora_request: AdapterChoices, lora: AdapterChoices
    ) -> None:
        """Set the requests' adapters, and load new ones."""
        for request, chosen in zip(requests, expand_adapters(lora_request, lora, len(requests)), strict=True):
            if chosen is None:
                continue
            if not self._options.enable_lora:
                raise InvalidRequest("adapters need LLM(..., enable_lora=True)", "lora_request")
            request.adapter = self._run(self._adapters.obtain(chosen))

    def _complete(self, prepared: Sequence[PreparedPrompt], use_tqdm: UseTqdm) -> list[RequestOutput]:
        generations = [self._open(request) for _, request in prepared]
        with create_bar(use_tqdm, len(prepared)) as bar:
            results = self._run(run_all(generations, bar))
        return [
            self._build_output(text, generation, deltas)
            for (text, _), generation, deltas in zip(prepared, generations, results, strict=True)
        ]

    def _build_output(self, prompt: str | None, generation: Generation, deltas: list[Delta]) -> RequestOutput:
        self._num_requests += 1
        tokenizer = self._model.tokenizer
        params = generation.request.params
        ids = generation.request.prompts[0]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None]
            for token_id, entry in zip(ids[1:], deltas[0].prompt_logprobs or [], strict=True):
                prompt_logprobs.append(build_token_logprobs(token_id, entry, params.prompt_logprobs, tokenizer))
        return RequestOutput(
            request_id=str(self._num_requests - 1),
            prompt=prompt,
            prompt_token_ids=ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[build_completion(delta, generation.request, tokenizer) for delta in deltas],
            num_cached_tokens=generation.counts().cached,
        )

    def _prepare_pooling(
        self,
        job: Callable[[bytes, JobContext], ValidPoolingRequest],
        bodies: Sequence[Mapping[str, object]],
        lora_request: AdapterChoices,
        lora: AdapterChoices,
    ) -> list[ValidPoolingRequest]:
        """Prepare one request per body, for the route of `job`."""
        self._check_open()
        prepared = [job(msgspec.json.encode(body), self._context) for body in bodies]
        self._add_adapters([one.request for one in prepared], lora_request, lora)
        return prepared

    def _pool(
        self, prepared: Sequence[ValidPoolingRequest], build: OutputBuilder[VectorOutput], use_tqdm: UseTqdm
    ) -> list[PoolingRequestOutput[VectorOutput]]:
        """Compute all requests together."""
        generations = [self._open(one.request) for one in prepared]
        with create_bar(use_tqdm, len(prepared)) as bar:
            results = self._run(run_all(generations, bar))
        outputs = []
        for one, deltas in zip(prepared, results, strict=True):
            self._num_requests += 1
            vector_output = build(one, [delta.vector or b"" for delta in deltas])
            ids = [token_id for prompt in one.request.prompts for token_id in prompt]
            outputs.append(PoolingRequestOutput(str(self._num_requests - 1), ids, vector_output))
        return outputs

    def _open(self, request: TextRequest) -> Generation:
        request.cache_salt = self._cache_salt + request.cache_salt
        return self._generator.open(request)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _create_supervisor(options: Options, directory: str) -> Supervisor:
    return Supervisor(options, directory)


def _stop(supervisor: Supervisor, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
