"""The offline class: the server's own path from text to engine and back, without HTTP.

The engine is a process of its own, as for the daemon; an event loop in a thread talks to it, so that these plain
functions can be called from anywhere, notebooks included.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from serve_llm.engine.hub import resolve_model
from serve_llm.engine.options import Options
from serve_llm.engine.types import TokenLogprobs
from serve_llm.server.errors import InvalidRequest
from serve_llm.server.generate import Generation, Generator
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.prompt.validate import check_text, prepare
from serve_llm.server.reply.delta import Delta
from serve_llm.server.statistics import Statistics
from serve_llm.server.supervise import Supervisor

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability in the raw distribution, and its rank (1: the likeliest)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | str | None  # the stop id or stop string that ended the text, if one of the request's did
    logprobs: list[dict[int, Logprob]] | None  # per token: itself and the likeliest
    cumulative_logprob: float | None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its n choices."""

    request_id: str
    prompt: str | None  # None if it was given as ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # the first entry is None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class LLM:
    """A model to generate with. Options are the daemon's, with underscores: LLM("demo", max_model_len="1k").

    Raises ServeError with one clear line if the model cannot be served. Ends its engine when it is closed, collected,
    or when the program ends; a context manager closes it at the end of the block.
    """

    def __init__(self, model: str, **options: object) -> None:
        self._options = Options.from_kwargs(model, **options)
        chosen = self._options
        with_weights = chosen.load_format == "auto"
        directory = resolve_model(chosen.model, chosen.revision, chosen.download_dir, weights=with_weights)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(self._loop,), name="serve-llm", daemon=True)
        thread.start()
        self._supervisor = self._run(_supervise(chosen, str(directory)))
        self._close = weakref.finalize(self, _stop, self._supervisor, self._loop, thread)
        try:
            self._model = ServedModel.load(directory, chosen)
            self._run(self._supervisor.start())
        except BaseException:
            self.close()
            raise
        self._replicas = self._supervisor.replicas
        self._replicas.on_step = Statistics(self._replicas.engines).count_step
        self._generator = Generator(self._replicas, self._model, chosen.seed)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them in one go; outputs in their order.

        prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of such.
        sampling_params: one for all, or one for each; by default what the model's generation_config.json says.
        Raises InvalidRequest (a ValueError) before anything runs if a prompt or parameter cannot work, and
        GenerationFailed if the engine fails.
        """
        parsed = [_parse(prompt) for prompt in _as_list(prompts)]
        return self._complete(parsed, self._params_for(len(parsed), sampling_params), use_tqdm, True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them; messages as in OpenAI's API. Errors as in `generate`."""
        template = self._model.template
        if template is None:
            raise InvalidRequest("the model has no chat template; give one with chat_template=...", "messages")
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        rendered: list[str | list[int]] = [
            template.render(
                [dict(message) for message in conversation],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._complete(rendered, self._params_for(len(rendered), sampling_params), use_tqdm, False)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return SamplingParams(**self._model.defaults)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if len(given) != count:
            raise InvalidRequest(f"{len(given)} sampling_params for {count} prompts", "sampling_params")
        return given

    def _complete(
        self, prompts: list[str | list[int]], params: Sequence[SamplingParams], use_tqdm: bool, special: bool
    ) -> list[RequestOutput]:
        facts, model = self._replicas.facts, self._model
        requests = []
        for prompt, chosen in zip(prompts, params, strict=True):
            if isinstance(prompt, str):
                check_text(prompt, model, facts, chosen.truncate_prompt_tokens is not None, "prompt")
            ids = prompt if isinstance(prompt, list) else model.tokenizer.encode(prompt, add_special_tokens=special)
            requests.append(prepare([ids], chosen, model, facts))
        generations = [self._generator.open(request) for request in requests]
        with tqdm(total=len(prompts), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            wholes = self._run(_gather(generations, bar))
        outputs = []
        for prompt, generation, deltas in zip(prompts, generations, wholes, strict=True):
            outputs.append(self._output(prompt, generation, deltas))
        return outputs

    def _output(self, prompt: str | list[int], generation: Generation, deltas: list[Delta]) -> RequestOutput:
        self._num_requests += 1
        tokenizer, request = self._model.tokenizer, generation.request
        ids, params = request.prompts[0], request.params
        found = deltas[0].prompt_logprobs
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            entries = zip(ids[1:], found or [], strict=True)
            prompt_logprobs = [None, *(_logprobs(i, entry, tokenizer) for i, entry in entries)]
        return RequestOutput(
            request_id=str(self._num_requests - 1),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[_completion(delta, params, tokenizer) for delta in deltas],
            num_cached_tokens=generation.counts().cached,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _supervise(options: Options, directory: str) -> Supervisor:
    return Supervisor(options, directory)


async def _gather(generations: list[Generation], bar: tqdm[Any]) -> list[list[Delta]]:
    num_tokens = 0

    async def one(generation: Generation) -> list[Delta]:
        nonlocal num_tokens
        with generation:
            whole = await generation.whole()
        num_tokens += generation.counts().completion
        bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.1f} output tokens/s", refresh=False)
        bar.update()
        return whole

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(generation)) for generation in generations]
    except BaseExceptionGroup as errors:  # the first one made the others give up
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _stop(supervisor: Supervisor, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _parse(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if found is None:
            raise InvalidRequest("a prompt must hold 'prompt' or 'prompt_token_ids'", "prompts")
        return _parse(found)
    return prompt if isinstance(prompt, str) else [int(token_id) for token_id in prompt]


def _completion(delta: Delta, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative: float | None = None
    if params.logprobs is not None:
        found = [(entry.token_id, entry.logprobs) for entry in delta.entries if entry.logprobs is not None]
        logprobs = [_logprobs(token_id, entry, tokenizer) for token_id, entry in found]
        cumulative = sum(entry.logprob for _, entry in found)
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        stop_reason=delta.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
    )


def _logprobs(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    found = {token_id: Logprob(entry.logprob, entry.rank, tokenizer.token_text(token_id))}
    for rank, (other, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        found.setdefault(other, Logprob(logprob, rank, tokenizer.token_text(other)))
    return found
