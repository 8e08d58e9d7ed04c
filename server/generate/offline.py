"""Run many requests to completion, with a progress bar, for the class `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from serve_llm.server.generate.delta import Delta
from serve_llm.server.generate.generation import Generation

UseTqdm = bool | Callable[..., "tqdm[Any]"]  # whether to show a bar, or a replacement for tqdm


def create_bar(use_tqdm: UseTqdm, total: int) -> tqdm[Any]:
    if isinstance(use_tqdm, bool):
        return tqdm(total=total, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True)
    return use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)


async def run_all(generations: list[Generation], bar: tqdm[Any]) -> list[list[Delta]]:
    """Return the deltas of each generation, one per choice. Raises the first error, after ending all others."""
    num_tokens = 0

    async def run(generation: Generation) -> list[Delta]:
        nonlocal num_tokens
        with generation:
            deltas = await generation.read_whole()
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
