"""Measure the host's time per decode step, part by part: scheduling, inputs, sampling, results, messages.

Run: PYTHONPATH=tests python -m bench.host_time [--streams 1 64 256] [--steps 100]. Prints a table of microseconds, then
one JSON line. Times are processor time of this thread, so other work on the machine counts little.

Scheduler, input batch, graph buffers, sampler and loop are those of an engine on a GPU: a step starts before the
results of the last one are back, unless a request reads its own output. Model and kernels are fakes and cost nothing: a
captured step replays nothing, and sampled ids come from a table. So this is a lower bound for the duration of a step,
however fast the GPU is. Copies to the GPU and kernel launches, which do not happen here, come on top.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from unittest import mock

import msgspec
import torch
from torch import Tensor

from bench.steps import Stopwatch, time_calls
from serve_llm.common import messages
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.distributed.inprocess import InProcessExecutor
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.parallel.groups import SingleRankGroup
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.sampling import choose
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.policy import TokenBudget
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker import model_runner
from serve_llm.engine.worker.graphs import CapturedGraph
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from serve_llm.engine.worker.model_runner import ModelRunner
from serve_llm.engine.worker.pending_step import PendingStep
from serve_llm.kernels.sampling import LogitAdjustments
from support.config import CONFIG

BLOCK_SIZE = 16
PROMPT = 256  # tokens
MAX_MODEL_LEN = 4096
VOCAB = 512  # vocabulary of the fake logits, small so that copies cost little
WARM_STEPS = 20  # decode steps before the measured ones
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled, penalties": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
}
# Paths of the parts, starting at the engine.
CALLS = (
    ("schedule", "scheduler.schedule"),
    ("inputs", "_executor._worker.runner.start"),
    ("inputs", "_executor._worker.runner._input_batch.apply"),
    ("inputs", "_executor._worker.runner._input_batch.gather"),
    ("sampling", "_executor._worker.runner._sample"),
    ("results", "scheduler.update_from_output"),
)
PARTS = ("schedule", "inputs", "sampling", "results", "message to the server", "loop", "step")
BETWEEN_PROCESSES = "messages to and from a rank"  # not part of a rank's step, which runs in the engine's process


class PlayedModel:
    """A fake model that computes nothing; its steps can be captured."""

    capturable = True
    collected_layers: tuple[int, ...] = ()
    collected: Sequence[Tensor] = ()
    pooler = None

    def __init__(self, max_num_seqs: int) -> None:
        self._logits = torch.zeros(max_num_seqs, VOCAB)

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        return torch.empty(len(inputs.ids if rows is None else rows), 1)

    def receive(self, num_tokens: int) -> None:
        """Do nothing: there is only one pipeline stage."""

    def send(self, hidden: Tensor) -> None:
        """Do nothing: there is only one pipeline stage."""

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        return self.forward(inputs, caches, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        raise AssertionError("there are no other engines")


class PlayedCapture:
    """Captures empty graphs."""

    def __init__(self, device: torch.device) -> None: ...

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        return CapturedGraph(lambda: None, compute())


class PlayedSampling:
    """A fake `kernels.sampling.DeviceSamplingKernels` that returns arbitrary ids."""

    def __init__(self, max_num_seqs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(VOCAB, (61, max_num_seqs), generator=generator)
        self._step = 0

    def sample(self, logits: Tensor, draws: Tensor, sampled: bool = True, filtered: bool = True) -> Tensor:
        self._step += 1
        return self._ids[self._step % len(self._ids), : len(logits)]

    def adjust(self, scores: Tensor, adjustments: LogitAdjustments) -> None: ...


class PlayedWorker:
    """The worker of an engine in one process. Also encodes what it would exchange with a worker in another process."""

    eplb_stats = None

    def __init__(self, runner: ModelRunner, watch: Stopwatch) -> None:
        self.runner = runner
        encoder = msgspec.msgpack.Encoder()
        steps = msgspec.msgpack.Decoder(SchedulerOutput)
        answers = msgspec.msgpack.Decoder(list[RunnerOutput])
        self._carry_step = watch.wrap(BETWEEN_PROCESSES, lambda step: steps.decode(encoder.encode(step)))
        self._carry_answer = watch.wrap(BETWEEN_PROCESSES, lambda answer: answers.decode(encoder.encode(answer)))
        self._watch = watch

    def start(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> PendingStep:
        pending = self.runner.start(self._carry_step(scheduler_output), masks)
        finish = self._watch.wrap("sampling", pending.finish)
        return PendingStep(pending.is_ready, lambda: self._carry_answer(finish()))


def build_engine(streams: int, watch: Stopwatch) -> EngineCore:
    """Build an engine with timers. All prompts fit into one step: otherwise streams that read their own output would
    stay in two batches, one of which is always in flight."""
    config = replace(
        CONFIG,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=streams,
        max_num_batched_tokens=2 * PROMPT * streams,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        async_scheduling=True,
        enforce_eager=False,
    )
    kv_cache_config = KVCacheConfig(
        (KVCacheSpec(BLOCK_SIZE, None),), block_bytes=1, num_blocks=streams * MAX_MODEL_LEN // BLOCK_SIZE
    )
    kernels = PlayedSampling(streams)
    vocabulary = VocabParallelLogits([range(VOCAB)], SingleRankGroup(), kernels)  # type: ignore[arg-type]
    with (
        mock.patch.object(model_runner, "CudaCapture", PlayedCapture),
        mock.patch.object(choose, "choose_device_sampling", lambda device: kernels),
    ):
        played = ModelRunner(
            config, PlayedModel(streams), [], kv_cache_config, vocabulary, Shard(ParallelLayout(), 0, range(1))
        )
    worker = PlayedWorker(played, watch)
    engine = EngineCore(config, InProcessExecutor(config, worker, kv_cache_config))  # type: ignore[arg-type]
    engine._budget = TokenBudget(config.max_num_batched_tokens, None)  # as on a GPU
    missing = time_calls(engine, watch, CALLS)
    assert not missing, f"there is no {missing} to put a timer around"
    return engine


def submit(engine: EngineCore, streams: int, max_tokens: int, params: Mapping[str, float]) -> None:
    """Submit requests with prompts of different lengths, so that they need new blocks in different steps."""
    rng = random.Random(0)
    requests = []
    for number in range(streams):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT + number % BLOCK_SIZE)]
        sampling = Sampling(max_tokens=max_tokens, seed=number, stop_token_ids=(VOCAB,), **params)  # type: ignore[arg-type]
        requests.append(EngineCoreRequest(id=number + 1, prompt_ids=prompt, sampling=sampling))
    engine.add_requests(requests)


@dataclass(frozen=True)
class Spread:
    """Quartiles in microseconds."""

    low: float  # first quartile
    median: float
    high: float  # third quartile


def spread(seconds: Sequence[float]) -> Spread:
    low, median, high = (1e6 * value for value in statistics.quantiles(seconds, n=4))
    return Spread(round(low, 1), round(median, 1), round(high, 1))


def measure(streams: int, steps: int, params: Mapping[str, float]) -> dict[str, Spread]:
    """Time each part of a step in which every stream gets one token."""
    watch = Stopwatch(time.thread_time)
    engine = build_engine(streams, watch)
    submit(engine, streams, MAX_MODEL_LEN, params)
    encode = watch.wrap("message to the server", messages.encode)
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, BETWEEN_PROCESSES)}
    engine.step()  # all prompts
    for number in range(-WARM_STEPS, steps):
        watch.seconds.clear()
        watch.on = True
        began = time.thread_time()
        output = engine.step()
        encode(output)
        seconds = time.thread_time() - began
        watch.on = False
        assert len(output.outputs) == output.stats.step_tokens == streams, "every stream gets one token in every step"
        if number < 0:
            continue
        parts = dict(watch.seconds)
        between = parts.pop(BETWEEN_PROCESSES)
        parts["loop"] = seconds - between - sum(parts.values())
        parts["step"] = seconds - between
        for part, value in (parts | {BETWEEN_PROCESSES: between}).items():
            found[part].append(value)
    return {part: spread(values) for part, values in found.items()}


def table(cases: Mapping[str, Mapping[str, Spread]]) -> list[str]:
    """Format the table: the median, and the range of the middle half of the steps."""
    rows = [["us a step: median (middle half)", *cases]]
    for part in (*PARTS, BETWEEN_PROCESSES):
        cells = [case[part] for case in cases.values()]
        rows.append([part, *(f"{cell.median:.0f} ({cell.low:.0f}-{cell.high:.0f})" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=100, help="measured steps per case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as engines do
    found = {}
    for name, params in CASES.items():
        cases = {f"{streams} streams": measure(streams, given.steps, params) for streams in given.streams}
        print(f"{name}\n" + "\n".join(table(cases)) + "\n", flush=True)
        found[name] = {key: {part: asdict(value) for part, value in case.items()} for key, case in cases.items()}
    print(json.dumps({"microseconds": found}))


if __name__ == "__main__":
    main()
