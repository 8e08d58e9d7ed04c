"""Steps as in a server, in the shape of Llama 8B: prompts that arrive while others decode, contexts of unequal length,
and a short chunk after a long cached prefix."""

from __future__ import annotations

import statistics

from floors import (
    ARRIVING,
    BEHIND,
    CONTEXT,
    LLAMA_8B_LONG,
    LONG_CONTEXT,
    arrivals,
    even,
    floor_seconds,
    products_seconds,
    uneven,
)

from parts import common
from parts.engine_steps import Arrivals, decoding_engine, first_token_seconds, forget, prompt, tell_kernels, timed_steps
from serve_llm.common.types import EngineCoreRequest, Sampling

STEPS = 40


def with_arrivals(here: common.Place, folder: str) -> None:
    """Compare with pure decode steps of the same engine, and the products that the prompt adds to them."""
    spec, found = LLAMA_8B_LONG.spec(), common.limits(here.rehearse)
    batch, context, count = here.sized(64, 3), here.sized(CONTEXT, 32), here.sized(STEPS, 4)
    arriving = here.sized(ARRIVING, 20)
    engine = decoding_engine(here, folder, [context] * batch, 4 * count, spare=8 * arriving)
    pure = timed_steps(engine, count, [])
    prompts = Arrivals(engine, arriving)
    prompts.run(5)  # compiles what the others use
    took, computed = prompts.run(count)
    name = f"{batch} streams, a prompt of {arriving} tokens with each step"
    common.tell_step(here, name, took, spec, arrivals(batch, context, arriving), found)
    here.report.measured(f"{name}: tokens of a step, median", statistics.median(computed), aim=batch + arriving)
    here.report.measured(f"{name}: the same streams without prompts", pure * 1000, "ms")
    least = pure + products_seconds(spec, arriving, found)
    here.report.measured(f"{name}: over decode and the prompt's products", took / least, aim=1.5)
    tell_kernels(here, name, lambda: prompts.run(count), count)


def with_unequal_contexts(here: common.Place, folder: str) -> None:
    """Compare with contexts of equal length and the same total."""
    spec, found = LLAMA_8B_LONG.spec(), common.limits(here.rehearse)
    count = here.sized(STEPS, 4)
    unequal = uneven(here.sized(64, 4), here.sized(CONTEXT, 16), here.sized(LONG_CONTEXT, 300))
    times = []
    for name, contexts in (("equal", even(unequal)), ("unequal", unequal)):
        engine = decoding_engine(here, folder, contexts, count)
        times.append(timed_steps(engine, count, []))
        chunks = [(1, context) for context in contexts]
        common.tell_step(here, f"decode, {name} contexts", times[-1], spec, chunks, found)
        del engine
        forget()
    here.report.measured("decode, unequal contexts over equal ones", times[1] / times[0], aim=1.3)


def behind_a_prefix(here: common.Place, folder: str) -> None:
    spec, found = LLAMA_8B_LONG.spec(), common.limits(here.rehearse)
    context, new = here.sized(LONG_CONTEXT, 256), here.sized(BEHIND, 10)
    engine = decoding_engine(here, folder, [16], 1, spare=context + 16 * new)
    engine.abort_requests([0])
    while engine.has_work:
        engine.step()
    prefix, sampling = prompt(context, 1), Sampling(max_tokens=1, temperature=0.0, seed=0)
    first_token_seconds(engine, EngineCoreRequest(id=1, prompt_ids=prefix, sampling=sampling))
    times = []
    for number in range(2, 9):
        request = EngineCoreRequest(id=number, prompt_ids=prefix + prompt(new, number), sampling=sampling)
        times.append(first_token_seconds(engine, request))
    took, name = statistics.median(times[2:]), f"{new} new tokens behind {context}"
    common.tell_step(here, name, took, spec, [(new, context + new)], found)
    cold = floor_seconds(spec, [(context + new, context + new)], found)
    here.report.measured(f"{name}: over the floor of the whole prompt", took / cold)


def main() -> None:
    here = common.place("mixed")
    folder = here.folder(LLAMA_8B_LONG)
    with_arrivals(here, folder)
    forget()
    with_unequal_contexts(here, folder)
    behind_a_prefix(here, folder)


if __name__ == "__main__":
    main()
