"""For the class `LLM`: run many requests to completion, with a progress bar, explain which methods it does not have,
and refuse the server's options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from serve_llm.common.errors import OptionError
from serve_llm.common.options.schema import Options
from serve_llm.server.generate.delta import Delta
from serve_llm.server.generate.generation import Generation

UseTqdm = bool | Callable[..., "tqdm[Any]"]  # whether to show a bar, or a replacement for tqdm


def check_options(options: Options) -> None:
    """Raise OptionError for an option that only a server can have."""
    if options.otlp_traces_endpoint is not None:
        raise OptionError("otlp_traces_endpoint: only requests over HTTP have traces")
    if options.enable_log_requests:
        raise OptionError("enable_log_requests: only requests over HTTP are logged")
    if options.has_front_ends:
        raise OptionError("front_ends, front_end_addr: only the server has front ends")
    if options.is_scalable:
        raise OptionError("data_parallel_min, data_parallel_max: only a server adds and removes engines")


def create_bar(use_tqdm: UseTqdm, total: int) -> AbstractContextManager[tqdm[Any] | None]:
    if use_tqdm is False:
        return nullcontext()
    create = tqdm if use_tqdm is True else use_tqdm
    return create(total=total, desc="Processed prompts", dynamic_ncols=True)


async def run_all(generations: list[Generation], bar: tqdm[Any] | None) -> list[list[Delta]]:
    """Return the deltas of each generation, one per choice. Raises the first error, after ending all others."""
    num_tokens = 0

    async def run(generation: Generation) -> list[Delta]:
        nonlocal num_tokens
        with generation:
            deltas = await generation.read_whole()
        if bar is None:
            return deltas
        num_tokens += generation.counts().completion
        bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.1f} output tokens/s", refresh=False)
        bar.update()
        return deltas

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(generation)) for generation in generations]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run it until it is stopped, and close it."""
    loop.run_forever()
    loop.close()


_OTHER_PROCESS = "the engine is a separate process; close() frees its memory"
_REPLACED = {
    "beam_search": "n with a temperature gives several texts",
    "encode": "embed and classify return vectors and probabilities",
    "reward": "classify returns the scores of a reward model",
    "sleep": _OTHER_PROCESS,
    "wake_up": _OTHER_PROCESS,
    "collective_rpc": _OTHER_PROCESS,
    "apply_model": _OTHER_PROCESS,
    "start_profile": "attach the profiler to the engine's process",
    "stop_profile": "attach the profiler to the engine's process",
    "llm_engine": "generate, chat, embed, classify and score run requests",
    "enqueue": "generate runs all prompts of a call together",
    "wait_for_completion": "generate runs all prompts of a call together",
    "preprocess_chat": "chat renders conversations and runs them; POST /tokenize of a server returns their ids",
    "set_tokenizer": "the keyword tokenizer of LLM names another one",
    "model_config": "config.json of the checkpoint holds it",
    "shutdown": "close() ends the engine",
}


class RefusedMethods:
    """Names what takes the place of a method of vLLM's `LLM`. `hasattr` stays false."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            hint = _REPLACED.get(name)
            text = f"{type(self).__name__} has no {name}" + (f": {hint}" if hint else "")
            raise AttributeError(text, name=name, obj=self)
