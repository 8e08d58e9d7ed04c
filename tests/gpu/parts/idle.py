"""The share of time in steady decoding during which no kernel runs on the GPU, over some fifty steps of an engine in
this process; which kernels take the most time; and what the host does in a step."""

from __future__ import annotations

import statistics

from floors import CONTEXT, LLAMA_8B, QWEN_HALF_B, Shape

from parts import common
from parts.engine_steps import decoding_engine, forget, tell_kernels, timed_steps

STEPS = 50


def decoding(here: common.Place, name: str, shape: Shape, batch: int, aim: float | None) -> None:
    forget()
    context, count = here.sized(CONTEXT, 32), here.sized(STEPS, 4)
    engine = decoding_engine(here, here.folder(shape), [context] * batch, 2 * count)
    executed: list[float] = []
    took = timed_steps(engine, count, executed)
    name = f"{name}, batch {batch}"
    here.report.measured(f"{name}: a step", took * 1000, "ms")
    here.report.measured(f"{name}: host in `execute`, median", statistics.median(executed) * 1000, "ms")
    tell_kernels(here, name, lambda: timed_steps(engine, count, executed), count, aim)


def main() -> None:
    here = common.place("idle")
    decoding(here, "8B", LLAMA_8B, here.sized(64, 3), 0.03)
    decoding(here, "8B", LLAMA_8B, 1, None)
    decoding(here, "0.5B", QWEN_HALF_B, 1, None)
    decoding(here, "0.5B", QWEN_HALF_B, here.sized(64, 2), None)


if __name__ == "__main__":
    main()
