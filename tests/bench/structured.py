"""Measure what structured output costs and saves: decode steps of 16 streams with and without a JSON schema, the time
to compile a schema, and tokens per second of one stream with and without jump-forward.

Run on a quiet machine: PYTHONPATH=tests python -m bench.structured [--turns 24] [--streams 8]

A 0.5B-shaped model with random weights runs in this process, with a tokenizer that has as many tokens as the model has
logits: the demo model's tokens and concatenations of two or three of them. The tokenizer itself writes only the former,
so forced texts have more tokens here than with a real tokenizer of that size. Steps with and without a schema take
turns; the share is the median of the turns, with its quartiles. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from bench.model import model_folder
from serve_llm.common.grammar import build_matcher
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.server.structured_output.compiler import GrammarCompiler
from serve_llm.server.structured_output.params import StructuredOutputs
from support.engine import make_engine

STREAMS = 16
STEPS_PER_TURN = 10
PERSON = {
    "name": {"type": "string"},
    "email": {"type": "string", "format": "email"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "roles": {"type": "array", "items": {"enum": ["admin", "editor", "viewer"]}, "maxItems": 3},
    "address": {
        "type": "object",
        "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "zip"],
        "additionalProperties": False,
    },
}


INVOICE = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 16},
        "invoice_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "total_amount": {"type": "integer", "minimum": 0, "maximum": 99999},
        "is_paid": {"type": "boolean"},
        "line_items": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "description": {"type": "string", "maxLength": 16},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["description", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer_name", "invoice_number", "currency", "total_amount", "is_paid", "line_items"],
    "additionalProperties": False,
}
CALL = r"""
start: begin "{\"city\": " city ", \"unit\": " unit "}}\n</tool_call>"
begin: "<tool_call>\n{\"name\": \"get_current_weather\", \"arguments\": "
city: %json {"type": "string", "maxLength": 16}
unit: %json {"enum": ["celsius", "fahrenheit"]}
"""
FORCED = {
    "JSON extraction": StructuredOutputs(json=INVOICE, whitespace_pattern=" ?"),
    "JSON extraction, compact": StructuredOutputs(json=INVOICE, disable_any_whitespace=True),
    "tool call": StructuredOutputs(grammar=CALL),
}


def typical_schema(number: int) -> dict[str, object]:
    """Return a typical schema; different numbers give different schemas."""
    people = {f"person_{number}": {"type": "object", "properties": PERSON, "required": list(PERSON)}}
    return {"type": "object", "properties": people, "required": list(people), "additionalProperties": False}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    raw = json.loads((resolve_model("demo") / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    pieces = list(vocab)
    chooser = random.Random(0)
    while len(vocab) < vocab_size:
        vocab.setdefault("".join(chooser.choices(pieces, k=chooser.choice((2, 2, 3)))), len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def build_engine(folder: Path, jump_forward: bool) -> EngineCore:
    return make_engine(
        folder,
        load_format="dummy",
        max_num_seqs=STREAMS,
        kv_cache_memory="512MiB",
        enable_prefix_caching=False,
        jump_forward=jump_forward,
    )


def measure_steps(engine: EngineCore, grammar: str, seed: int, steps: int) -> list[float]:
    """Return the seconds of decode steps of STREAMS requests."""
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=[(7 * number + place) % 1000 for place in range(64)],
            sampling=Sampling(max_tokens=steps + 8, seed=seed + number, top_p=0.9, grammar=grammar),
        )
        for number in range(STREAMS)
    ]
    engine.add_requests(requests)
    while engine.scheduler.num_running < STREAMS:
        engine.step()
    engine.step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.abort_requests([request.id for request in requests])
    engine.step()
    return seconds


def compare_steps(engine: EngineCore, grammar: str, turns: int) -> tuple[float, float, list[float]]:
    """Return the median seconds of a step without and with the grammar, and each turn's slowdown as a share."""
    without: list[float] = []
    with_grammar: list[float] = []
    for turn in range(turns):
        without.append(statistics.median(measure_steps(engine, "", turn, STEPS_PER_TURN)))
        with_grammar.append(statistics.median(measure_steps(engine, grammar, turn, STEPS_PER_TURN)))
    costs = [long / short - 1 for short, long in zip(without, with_grammar, strict=True)]
    return statistics.median(without), statistics.median(with_grammar), costs


def generate_one(engine: EngineCore, grammar: str, seed: int) -> tuple[list[int], float]:
    """Return the ids of one stream, and the seconds after its first ones."""
    sampling = Sampling(max_tokens=400, seed=seed, grammar=grammar, stop_token_ids=(0,))
    engine.add_requests([EngineCoreRequest(id=seed, prompt_ids=[seed, *range(63)], sampling=sampling)])
    ids: list[int] = []
    began = 0.0
    while engine.has_work:
        for output in engine.step().outputs:
            began = began or time.perf_counter()
            ids += output.token_ids
    return ids, time.perf_counter() - began


def measure_forced(engines: dict[bool, EngineCore], grammar: str, streams: int) -> dict[bool, float]:
    """Return tokens per second with and without jump-forward; both write the same streams, in turns."""
    num_tokens = 0
    seconds = {False: 0.0, True: 0.0}
    for seed in range(streams):
        written = {}
        for jump_forward, engine in engines.items():
            written[jump_forward], taken = generate_one(engine, grammar, seed)
            seconds[jump_forward] += taken
        assert written[True] == written[False], "jump-forward changes the text"
        num_tokens += len(written[True])
    return {jump_forward: num_tokens / taken for jump_forward, taken in seconds.items()}


def measure_compilation(folder: Path, vocab_size: int) -> dict[str, float]:
    """Return medians in seconds."""
    began = time.perf_counter()
    compiler = GrammarCompiler((folder / "tokenizer.json").read_text, vocab_size, 2**20)
    tokenizer = compiler.load_tokenizer()
    load = time.perf_counter() - began
    new: list[float] = []
    cached: list[float] = []
    engine: list[float] = []
    for number in range(30):
        wanted = StructuredOutputs(json=typical_schema(number))
        began = time.perf_counter()
        grammar = compiler.compile(wanted)
        new.append(time.perf_counter() - began)
        began = time.perf_counter()
        compiler.compile(wanted)
        cached.append(time.perf_counter() - began)
        began = time.perf_counter()
        build_matcher(tokenizer, grammar).compute_bitmask()
        engine.append(time.perf_counter() - began)
    return {
        "tokenizer": load,
        "new schema, server": statistics.median(new),
        "new schema, engine, first mask included": statistics.median(engine),
        "cached schema, server": statistics.median(cached),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--turns", type=int, default=24, help=f"turns of {STEPS_PER_TURN} steps, with and without a schema"
    )
    parser.add_argument("--streams", type=int, default=8, help="streams per kind of forced text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        shutil.copytree(model_folder(), folder)
        vocab_size = int(read_config(folder)["vocab_size"])  # type: ignore[call-overload]
        write_tokenizer(folder, vocab_size)
        found = measure_compilation(folder, vocab_size)
        compiler = GrammarCompiler((folder / "tokenizer.json").read_text, vocab_size, 2**20)
        # A long array: no stream ends during the measurement.
        schema = {"type": "array", "items": {"type": "object", "properties": PERSON}, "minItems": 1000}
        grammar = compiler.compile(StructuredOutputs(json=schema))
        engines = {jump_forward: build_engine(folder, jump_forward) for jump_forward in (False, True)}
        found["step"], found["constrained step"], costs = compare_steps(engines[False], grammar, given.turns)
        for name, value in found.items():
            print(f"{name:42}{1000 * value:10.3f} ms")
        low, median, high = statistics.quantiles(costs)
        print(f"{STREAMS} constrained streams: {median:+.1%} per step ({low:+.1%} to {high:+.1%})", flush=True)
        speeds: dict[str, dict[bool, float]] = {}
        for name, wanted in FORCED.items():
            speed = measure_forced(engines, compiler.compile(wanted), given.streams)
            speeds[name] = speed
            gain = speed[True] / speed[False]
            line = f"{name:30}{speed[False]:8.1f} tokens/s one by one{speed[True]:8.1f} with jump-forward{gain:8.2f} x"
            print(line, flush=True)
    print(json.dumps({"seconds": found, "tokens_per_second": speeds}))


if __name__ == "__main__":
    main()
