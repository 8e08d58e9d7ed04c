"""Step time as a linear model of the work in a step, given or fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serve_llm.engine.scheduler.output import SchedulerOutput


class StepWork(msgspec.Struct, frozen=True):
    """The work of one step."""

    prompt_tokens: int = 0
    num_decoding: int = 0  # sequences that get one token
    context_tokens: int = 0  # positions whose keys and values are read, once per sequence


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step and of the overheads around it. None is negative."""

    step_seconds: float  # independent of the work
    prompt_token_seconds: float
    sequence_seconds: float  # per decoding sequence
    context_token_seconds: float
    request_seconds: float = 0.0  # from a client to the engine's queue, and for the first token back

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 0:
            raise ValueError("costs must not be negative")
        if not self.step_seconds:
            raise ValueError("a step must take time")

    def seconds(self, work: StepWork) -> float:
        return (
            self.step_seconds
            + self.prompt_token_seconds * work.prompt_tokens
            + self.sequence_seconds * work.num_decoding
            + self.context_token_seconds * work.context_tokens
        )


# Derived by arithmetic, not measured: a model of 8 billion bfloat16 parameters, 32 layers with 8 KV heads of 128, on a
# GPU with 3.35 TB/s and 990 TFLOP/s, half of which prompts reach. 16 GB / 3.35 TB/s + 1.5 ms of host time; 16 GFLOP per
# token; 131 kB of keys and values per position.
GPU_8B = StepCosts(
    step_seconds=0.006_3,
    prompt_token_seconds=0.000_032,
    sequence_seconds=0.000_010,
    context_token_seconds=0.000_000_039,
    request_seconds=0.003,
)


def measure_work(output: SchedulerOutput) -> StepWork:
    num_decoding = 0
    prompt_tokens = 0
    context_tokens = 0
    for chunk in output.scheduled:
        count = chunk.count
        context_tokens += chunk.start + count
        if count == 1 and chunk.sample:
            num_decoding += 1
        else:
            prompt_tokens += count
    return StepWork(prompt_tokens, num_decoding, context_tokens)


def fit_costs(measured: Sequence[tuple[StepWork, float]], request_seconds: float = 0.0) -> StepCosts:
    """Fit non-negative costs with the least squared relative error. measured: steps and their seconds.

    Raises ValueError if there are not enough different steps.
    """
    rows = [[1.0, work.prompt_tokens, work.num_decoding, work.context_tokens] for work, _ in measured]
    if len(rows) < 4:
        raise ValueError("at least 4 measured steps are needed")
    weighted = [[value / seconds for value in row] for row, (_, seconds) in zip(rows, measured, strict=True)]
    used = [0, *(column for column in (1, 2, 3) if any(row[column] for row in rows))]
    while True:  # drop the most negative term until none is negative; always keep the first one
        found = _solve_least_squares([[row[column] for column in used] for row in weighted])
        if min(found) >= 0 and found[0] > 0:
            break
        scaled = [value * max(row[column] for row in rows) for value, column in zip(found, used, strict=True)]
        used.remove(min(zip(scaled[1:], used[1:], strict=True))[1])
    costs = [0.0] * 4
    for column, value in zip(used, found, strict=True):
        costs[column] = value
    return StepCosts(
        step_seconds=costs[0],
        prompt_token_seconds=costs[1],
        sequence_seconds=costs[2],
        context_token_seconds=costs[3],
        request_seconds=request_seconds,
    )


def _solve_least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return x with the least |rows x - 1|, by the normal equations of columns scaled to 1.

    Raises ValueError if some columns depend on others.
    """
    size = len(rows[0])
    scales = [max(abs(row[column]) for row in rows) for column in range(size)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda j: abs(matrix[j][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            raise ValueError("the measured steps are too much alike")
        for j in range(size):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]
