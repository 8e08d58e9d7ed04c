"""Compare tokens per second with and without speculative decoding by prompt lookup.

In about 4 minutes: OMP_WAIT_POLICY=passive PYTHONPATH=tests python -m bench.speculation [--tokens 200] [--turns 9]

Two engines in one process step alternately, so that other work on the machine disturbs both. They run the demo model,
so that texts are realistic: edits of functions of the standard library (a name replaced), quotes of them, and ordinary
code, which is sampled; one stream, and 8 at a time. `--texts other` uses texts that no rule was tuned on: other
functions, docstrings, JSON, lists, a mix in which one stream in eight copies, and a few ids in random order, whose
matches mean nothing. `--model DIRECTORY` runs another model; one with random weights copies nothing. Both engines write
the same ids. Prints a table, then one JSON line. `on / off` is the median over turns of the ratio of tokens per second,
`all` the ratio of the times of all turns, `cpu` the median for processor time, which other work disturbs less;
`accepted` is the share of accepted draft tokens, `per step` the ids per step, `aim` the target ratio (for 8 streams,
that no workload becomes slower). `--draft-model DIRECTORY` compares prompt lookup beside that model with the model
alone, which is "off" then. `--default` drafts as a server without the option does. `--same` runs two engines
without drafts, whose difference is the measurement error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.draft_texts import FEW_IDS, TEXTS, Task
from serve_llm.common.hub import resolve_model
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.speculation import ModelSpeculator
from support.engine import make_engine

STREAMS = 8
BIAS = 1000.0  # makes all ids without it impossible
AIM_OF_MANY = 0.97  # ratio of the tokens per second of all streams


@dataclass
class Turn:
    """One run of some streams on one engine."""

    seconds: float
    cpu_seconds: float
    ids: dict[int, list[int]]
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def num_ids(self) -> int:
        return sum(map(len, self.ids.values()))


def run_turns(engines: Mapping[bool, EngineCore], requests: Sequence[EngineCoreRequest]) -> dict[bool, Turn]:
    """Run the same requests on all engines, which step alternately so that other work on the machine disturbs all
    alike. Times start after the first id."""
    turns = {is_on: Turn(0.0, 0.0, {request.id: [] for request in requests}, 0, 0, 0) for is_on in engines}
    counts = {is_on: engine.step().stats for is_on, engine in engines.items()}
    before = {
        is_on: (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens) for is_on, stats in counts.items()
    }
    for engine in engines.values():
        engine.add_requests(requests)
    order = list(engines)
    while any(engine.has_work for engine in engines.values()):
        order.reverse()
        for is_on in order:
            if engines[is_on].has_work:
                step(engines[is_on], turns[is_on])
    for is_on, engine in engines.items():
        stats = engine.step().stats
        num_steps, num_drafted, num_accepted = before[is_on]
        turns[is_on].num_steps = stats.num_steps - num_steps
        turns[is_on].num_drafted = stats.num_draft_tokens - num_drafted
        turns[is_on].num_accepted = stats.num_accepted_tokens - num_accepted
    return turns


def step(engine: EngineCore, turn: Turn) -> None:
    has_begun = any(turn.ids.values())
    began = time.perf_counter()
    cpu_began = time.process_time()
    outputs = engine.step().outputs
    if has_begun:
        turn.seconds += time.perf_counter() - began
        turn.cpu_seconds += time.process_time() - cpu_began
    for output in outputs:
        turn.ids[output.id] += output.token_ids


def make_requests(task: Task, tokenizer: Tokenizer, turn: int, streams: int, tokens: int) -> list[EngineCoreRequest]:
    """Return the requests of a turn. Each turn belongs to another tenant, so that no draft comes from an earlier turn's
    output."""
    tenant = 1000 * streams + turn
    requests = []
    for number in range(streams):
        prompt = task.prompts[(turn + number) % len(task.prompts)]
        ids = tokenizer.encode(prompt).ids
        few = dict.fromkeys(sorted(set(ids))[:FEW_IDS], BIAS) if task.few_ids else {}
        sampling = Sampling(
            max_tokens=tokens,
            seed=100 * turn + number,
            temperature=task.temperature,
            logit_bias=few,
        )
        requests.append(EngineCoreRequest(id=number, prompt_ids=ids, sampling=sampling, tenant=tenant))
    return requests


def measure(engines: dict[bool, EngineCore], make: Sequence[Sequence[EngineCoreRequest]]) -> dict[str, float]:
    ratios = []
    seconds: dict[bool, list[float]] = {is_on: [] for is_on in engines}
    cpu_ratios = []
    speeds = []
    turns = []
    for requests in make:
        found = run_turns(engines, requests)
        assert found[True].ids == found[False].ids, "drafts change the text"
        ratios.append(found[False].seconds / found[True].seconds)
        cpu_ratios.append(found[False].cpu_seconds / found[True].cpu_seconds)
        speeds.append(found[False].num_ids / found[False].seconds)
        turns.append(found[True])
        for is_on, turn in found.items():
            seconds[is_on].append(turn.seconds)
    drafted = sum(turn.num_drafted for turn in turns)
    return {
        "tokens_per_second_off": statistics.median(speeds),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "total_ratio": sum(seconds[False]) / sum(seconds[True]),
        "cpu_ratio": statistics.median(cpu_ratios),
        "accepted": sum(turn.num_accepted for turn in turns) / max(1, drafted),
        "drafts_per_id": drafted / sum(turn.num_ids for turn in turns),
        "ids_per_step": sum(turn.num_ids for turn in turns) / sum(turn.num_steps for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per stream")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--texts", choices=TEXTS, default="tuned")
    parser.add_argument("--tasks", nargs="+", help="run only these texts")
    parser.add_argument("--model", default="demo", help="directory with weights and a tokenizer")
    parser.add_argument("--default", action="store_true", help="draft as without an option, only in small batches")
    parser.add_argument("--draft-model", help="directory of a draft model, which both engines have")
    parser.add_argument("--same", action="store_true", help="run both engines without drafts")
    given = parser.parse_args()
    folder = Path(resolve_model(given.model))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    configs: dict[bool, str | None] = {False: "none"}
    configs[True] = "none" if given.same else None if given.default else "ngram"
    if given.draft_model is not None:
        configs = dict.fromkeys(configs, given.draft_model)
    engines = {is_on: make_engine(folder, speculative_config=config) for is_on, config in configs.items()}
    if given.draft_model is not None:
        assert isinstance(engines[False]._speculator, ModelSpeculator)
        engines[False]._speculator.texts = None
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    results: dict[str, dict[str, float]] = {}
    for streams in (1, STREAMS):
        for name, task in TEXTS[given.texts]().items():
            if given.tasks and name not in given.tasks:
                continue
            requests = [make_requests(task, tokenizer, turn, streams, given.tokens) for turn in range(given.turns)]
            run_turns(engines, make_requests(task, tokenizer, 0, streams, 8))  # prefixes are cached from here on
            found = measure(engines, requests)
            found["aim"] = task.aim if streams == 1 else AIM_OF_MANY
            results[f"{name}, {streams} stream{'s' if streams > 1 else ''}"] = found
            print(f"{name}, {streams}: {found['ratio']:.3f}, load average {os.getloadavg()[0]:.1f}", flush=True)
    titles = f"{'on / off':>10}{'least':>8}{'all':>8}{'cpu':>8}{'aim':>8}{'accepted':>10}{'per step':>10}"
    print(f"{'':22}{'off, tokens/s':>14}{titles}")
    for name, found in results.items():
        names = ("least_ratio", "total_ratio", "cpu_ratio", "aim")
        ratios = f"{found['ratio']:10.2f}" + "".join(f"{found[key]:8.2f}" for key in names)
        shares = f"{found['accepted']:10.0%}{found['ids_per_step']:10.2f}"
        print(f"{name:22}{found['tokens_per_second_off']:14.1f}{ratios}{shares}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
