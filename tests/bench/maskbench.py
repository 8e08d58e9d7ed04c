"""Run the JSON schemas of MaskBench with their instances through the prompt workers and our matcher.

    PYTHONPATH=tests python -m bench.maskbench DIR [--sample 2000]

DIR: the folder maskbench/data of github.com/guidance-ai/jsonschemabench, which is not part of this repository. Each
schema is compiled as for a request, in a worker with its limits, for the demo model. Each instance is written with
json.dumps and followed token by token. For comparison, schemas that llguidance compiles alone, under its own limits,
are counted, and those of them that are refused here are listed with the reason. Prints a table, the keywords of the
refusals, every case that must not occur, and one JSON line. Exits with 1 if an invalid instance is accepted, a schema
takes longer than HANG_SECONDS, or a refusal names no keyword.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve_llm.common.grammar import build_matcher, build_tokenizer
from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from support.fakes import make_model_info

VOCAB_SIZE = 4096
HANG_SECONDS = 10.0  # far more than a worker may take, to allow for a busy machine
KEYWORD = re.compile(r"structured_outputs\.json(?: at #.*?)?: ([\w$-]+): ")
LIMIT = re.compile("the body nests more than ")


@dataclass
class Tally:
    """Counts over all schemas. compile_seconds: of accepted schemas; mask_seconds: one entry per token."""

    counts: Counter[str] = field(default_factory=Counter)
    keywords: Counter[str] = field(default_factory=Counter)
    compile_seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)  # messages by schema file
    stricter: list[str] = field(default_factory=list)  # refusals of schemas that llguidance alone accepts


def compiles_alone(tokenizer: LLTokenizer, schema: object) -> bool:
    """Return whether llguidance accepts the schema without our checks and limits."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher(tokenizer, grammar, log_level=0).is_error()


def follow(tokenizer: LLTokenizer, grammar: str, text: str, mask_seconds: list[float]) -> str:
    """Match a text token by token. Returns "accepted", "rejected", or the matcher's error."""
    matcher = build_matcher(tokenizer, grammar)
    for token_id in tokenizer.tokenize_str(text):
        began = time.perf_counter()
        mask = matcher.compute_bitmask()
        mask_seconds.append(time.perf_counter() - began)
        if matcher.is_error():
            return matcher.get_error().partition("\n")[0]
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return "rejected"
        matcher.consume_token(token_id)
    return "accepted" if matcher.is_accepting() else "rejected"


async def compile_schema(name: str, schema: object, pool: PromptPool, tally: Tally) -> str:
    """Return the grammar; empty if the schema is refused."""
    body = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}}).encode()
    began = time.perf_counter()
    grammar = ""
    try:
        reply = await pool.run("completion", body, ValidGenerateRequest)
        grammar = reply.request.samplings[0].grammar
    except InvalidRequest as error:
        tally.refusals[name] = error.message
        if found := KEYWORD.match(error.message):
            tally.keywords[found[1]] += 1
        elif LIMIT.match(error.message):
            tally.counts["refused by a limit of a request"] += 1
        else:
            tally.counts["refused without a keyword"] += 1
            tally.problems.append(f"{name}: refused without a keyword: {error.message[:300]}")
    seconds = time.perf_counter() - began
    if seconds > HANG_SECONDS:
        tally.counts["hangs"] += 1
        tally.problems.append(f"{name}: {seconds:.1f} s")
    if grammar:
        tally.counts["accepted"] += 1
        tally.compile_seconds.append(seconds)
    return grammar


async def run_case(name: str, case: dict[str, Any], pool: PromptPool, tokenizer: LLTokenizer, tally: Tally) -> None:
    tally.counts["schemas"] += 1
    is_known = compiles_alone(tokenizer, case["schema"])
    tally.counts["accepted by llguidance alone"] += is_known
    grammar = await compile_schema(name, case["schema"], pool, tally)
    if not grammar:
        if is_known:
            tally.counts["refused, llguidance accepts"] += 1
            tally.stricter.append(f"{name}: llguidance accepts it: {tally.refusals[name]}")
        return
    for index, test in enumerate(case.get("tests", ())):
        verdict = follow(tokenizer, grammar, json.dumps(test["data"], ensure_ascii=False), tally.mask_seconds)
        kind = "valid" if test["valid"] else "invalid"
        known = verdict if verdict in ("accepted", "rejected") else "failed"
        tally.counts[f"{kind} instances {known}"] += 1
        if (kind, known) == ("invalid", "accepted") or known == "failed":
            tally.problems.append(f"{name}: {kind} instance {index}: {verdict}")


async def run_cases(paths: list[Path]) -> Tally:
    options = make_options("demo")
    directory = resolve_model("demo")
    tokenizer = build_tokenizer((directory / "tokenizer.json").read_text(), VOCAB_SIZE)
    pool = PromptPool(JobContext(ServedModel.load(directory, options), make_model_info(), options.limits), options)
    tally = Tally()
    try:
        for path in paths:
            await run_case(path.name, json.loads(path.read_text()), pool, tokenizer, tally)
    finally:
        pool.close()
    return tally


def print_tally(tally: Tally) -> None:
    for name, count in sorted(tally.counts.items()):
        print(f"{name:32}{count:9,}")
    for name, seconds in (("compilation", tally.compile_seconds), ("mask", tally.mask_seconds)):
        p50 = 1000 * statistics.median(seconds)
        p99 = 1000 * statistics.quantiles(seconds, n=100)[98]
        print(f"{name:24}{p50:9.3f} ms (p50){p99:9.3f} ms (p99){1000 * max(seconds):9.1f} ms (most)")
    print("refused:", ", ".join(f"{keyword} {count}" for keyword, count in tally.keywords.most_common()))
    for problem in [*tally.stricter, *tally.problems]:
        print(problem)
    print(json.dumps({"counts": tally.counts, "refused": tally.keywords}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sample", type=int, help="number of schemas, chosen at random; all by default")
    given = parser.parse_args()
    paths = sorted(given.directory.rglob("*.json"))
    if given.sample is not None:
        paths = sorted(random.Random(0).sample(paths, min(given.sample, len(paths))))
    tally = asyncio.run(run_cases(paths))
    print_tally(tally)
    if any(tally.counts[name] for name in ("invalid instances accepted", "hangs", "refused without a keyword")):
        sys.exit(1)


if __name__ == "__main__":
    main()
