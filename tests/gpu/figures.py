"""Write the results of the GPU check into docs/gpu.md, between marker lines:

    python tests/gpu/figures.py [RESULTS...]     # results.json of further runs, to add to tests/gpu/results.json
    python tests/gpu/figures.py --check          # only report whether the page is up to date

Predictions and lower bounds are written from here too, so that they count the same bytes as the check. Needs the
project's own environment; no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from floors import (  # noqa: E402
    BEHIND,
    EXPERTS_30B,
    LATENT_16B,
    LLAMA_8B,
    LLAMA_8B_BLOCKS,
    LONG_CONTEXT,
    PROMPT,
    QWEN_HALF_B,
    Chunks,
    Shape,
    arrivals,
    decodes,
    even,
    floor_seconds,
    uneven,
)
from report import Row  # noqa: E402
from results import Figure, Run, merge_runs, newest_attempts, newest_figures, read_runs, write_runs  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "tests" / "gpu" / "results.json"
MARKERS = {
    name: (f"<!-- {name}: begin (python tests/gpu/figures.py) -->", f"<!-- {name}: end -->")
    for name in ("predictions", "runs")
}
SHARE = ": share of the floor"


@dataclass(frozen=True)
class Prediction:
    """A prediction written before the measurement. part, name: the row that the check writes for it; chunks: of its
    step, if bytes and operations bound it."""

    work: str
    part: str
    name: str
    predicted: str
    aim: str
    shape: Shape | None = None
    chunks: Chunks = ()
    quantization: str | None = None

    @property
    def floor(self) -> str:
        if self.shape is None:
            return "-"
        return f"{1000 * floor_seconds(self.shape.spec(self.quantization), self.chunks):.2f} ms"


UNEQUAL = uneven()
PREFIX = [(BEHIND, LONG_CONTEXT + BEHIND)]
ARRIVING = "64 streams, a prompt of 200 tokens with each step"
PREDICTIONS = [
    Prediction("8B, batch 1", "speed", "8B: decode, batch 1", "4.9-5.3 ms", "0.70", LLAMA_8B, decodes(1)),
    Prediction("8B, batch 64", "speed", "8B: decode, batch 64", "7.4-8.0 ms", "0.70", LLAMA_8B, decodes(64)),
    Prediction("8B, batch 256", "speed", "8B: decode, batch 256", "17-19 ms", "0.70", LLAMA_8B, decodes(256)),
    Prediction(
        "8B, prompt of 8k", "speed", f"8B: prompt of {PROMPT}", "215-280 ms", "0.60", LLAMA_8B, [(PROMPT, PROMPT)]
    ),
    Prediction(
        "8B, 64 streams and a prompt of 200 tokens with each step",
        "mixed",
        ARRIVING,
        "9-11 ms, captured",
        "1.5 x decode and the prompt's products",
        LLAMA_8B,
        arrivals(),
    ),
    Prediction(
        "8B, 64 equal contexts, as long together as the next line's",
        "mixed",
        "decode, equal contexts",
        "9.5-11 ms",
        "-",
        LLAMA_8B,
        [(1, context) for context in even(UNEQUAL)],
    ),
    Prediction(
        "8B, 63 contexts of 1k and one of 64k",
        "mixed",
        "decode, unequal contexts",
        "10-13 ms: all keys are shared equally among programs",
        "1.3 x the equal ones",
        LLAMA_8B,
        [(1, context) for context in UNEQUAL],
    ),
    Prediction(
        "8B, 100 new tokens behind 64k",
        "mixed",
        f"{BEHIND} new tokens behind {LONG_CONTEXT}",
        "9-13 ms: the keys are split",
        "reported",
        LLAMA_8B,
        PREFIX,
    ),
    Prediction(
        "8B in fp8, batch 1", "fp8", "8B fp8: decode, batch 1", "3.2-3.8 ms", "reported", LLAMA_8B, decodes(1), "fp8"
    ),
    Prediction(
        "8B in fp8, batch 64", "fp8", "8B fp8: decode, batch 64", "6.2-7.5 ms", "reported", LLAMA_8B, decodes(64), "fp8"
    ),
    Prediction(
        "8B in fp8 blocks as stored, batch 1",
        "stored_fp8",
        "8B in fp8 blocks: decode, batch 1",
        "4.5-6 ms, like `--quantization fp8`",
        "reported",
        LLAMA_8B_BLOCKS,
        decodes(1),
    ),
    Prediction(
        "8B in fp8 blocks as stored, batch 64",
        "stored_fp8",
        "8B in fp8 blocks: decode, batch 64",
        "6-7.5 ms",
        "reported",
        LLAMA_8B_BLOCKS,
        decodes(64),
    ),
    Prediction(
        "8B in int4, batch 1",
        "int4",
        "8B int4: decode, batch 1",
        "2.2-3.2 ms",
        "reported",
        LLAMA_8B,
        decodes(1),
        "int4",
    ),
    Prediction(
        "8B in int4, batch 64",
        "int4",
        "8B int4: decode, batch 64",
        "6-10 ms, as each program unpacks what it multiplies",
        "reported",
        LLAMA_8B,
        decodes(64),
        "int4",
    ),
    Prediction(
        "30B-A3B experts, batch 64",
        "experts",
        "30B-A3B: decode, batch 64",
        "26-40 ms",
        "reported",
        EXPERTS_30B,
        decodes(64),
    ),
    Prediction(
        "16B with latent attention, batch 64",
        "latent",
        "16B MLA: decode, batch 64",
        "15-25 ms",
        "reported",
        LATENT_16B,
        decodes(64),
    ),
    Prediction("0.5B, batch 1", "speed", "0.5B: decode, batch 1", "0.8-1.0 ms", "reported", QWEN_HALF_B, decodes(1)),
    Prediction(
        "8B, offline, 1000 in and out, as many requests as fit",
        "offline",
        "8B: offline, 1000 in and out",
        "9,000 tokens/s; TensorRT-LLM publishes 17,744 in FP8",
        "reported",
    ),
    Prediction(
        "8B, prefill attention's speed over FlashAttention-3, 8k",
        "attention_times",
        "prompts, 1 x 8192: speed over FlashAttention-3",
        "0.55-0.65",
        "0.6",
    ),
    Prediction("HTTP over offline, 64 streams", "server", "64 streams over HTTP, over offline", "0.95", "0.90"),
    Prediction("HTTP over offline, 256 streams", "server", "256 streams over HTTP, over offline", "0.90", "0.90"),
    Prediction("8B, cold start to first token", "start", "8B, cold start: exec to first token", "16-22 s", "15 s"),
    Prediction(
        "8B, first request after a cold start over later ones",
        "start",
        "8B, cold start: first request over later ones",
        "50 or more: most kernels are compiled then",
        "2",
    ),
    Prediction(
        "8B, `--batch-invariant` over without, batch 64",
        "invariance",
        "8B: decode, batch 64, --batch-invariant over without",
        "0.85",
        "reported",
    ),
    Prediction(
        "8B, idle share of the GPU in decode, batch 64",
        "idle",
        "8B, batch 64: idle share of the GPU",
        "under 0.03",
        "0.03",
    ),
    Prediction(
        "8B, card in use after all sizes were captured",
        "memory",
        "card in use, share of its memory",
        "0.90-0.91",
        "0.90",
    ),
]


def predictions_table(figures: Sequence[Figure]) -> str:
    """Return lower bound, prediction, target and result, with the number of the run."""
    found = {(figure.row.part, figure.row.name): figure for figure in figures}
    lines = ["| work | floor | predicted | aim | seen | run |", "|---|---|---|---|---|---|"]
    for one in PREDICTIONS:
        figure, share = found.get((one.part, one.name)), found.get((one.part, one.name + SHARE))
        seen, run = "not run", ""
        if figure is not None:
            seen, run = cell(figure.row), str(figure.run)
        if share is not None:
            seen += f" ({cell(share.row)} of the floor)"
        lines.append(f"| {one.work} | {one.floor} | {one.predicted} | {one.aim} | {seen} | {run} |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    value = f"{row.value:,.4g}" if isinstance(row.value, int | float) else str(row.value)
    return f"{value} {row.unit}".strip().replace("|", "\\|").replace("\n", " ")


def runs_section(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    """Return the runs, the failures, the number of passed checks, and all measurements."""
    if not runs:
        return "No run yet."
    lines = ["| run | date (UTC) | card | driver | command | parts |", "|---|---|---|---|---|---|"]
    for number, run in enumerate(runs, 1):
        parts = ", ".join(name if attempt.is_done else f"{name} (failed)" for name, attempt in run.parts.items())
        lines.append(f"| {number} | {run.date[:19]} | {run.card} | {run.driver} | `{run.command}` | {parts} |")
    attempts = newest_attempts(runs)
    failed = [name for name, attempt in attempts.items() if not attempt.is_done]
    checks = [figure for figure in figures if figure.row.passed is not None]
    good = sum(bool(figure.row.passed) for figure in checks)
    lines += ["", f"{good} of {len(checks)} checks passed. Parts that failed: {', '.join(failed) or 'none'}.", ""]
    lines += ["| part | what | seen | aim | run |", "|---|---|---|---|---|"]
    for figure in figures:
        row = figure.row
        if row.passed is True:
            continue
        aim = "" if row.aim is None else f"{row.aim:g}"
        seen = cell(row) if row.passed is None else f"FAIL: {cell(row)}"
        lines.append(f"| {row.part} | {row.name} | {seen} | {aim} | {figure.run} |")
    return "\n".join(lines)


def renew(page: str, runs: Sequence[Run]) -> str:
    """Return the page with the text between its markers replaced. Raises ValueError if it lacks a marker."""
    figures = newest_figures(runs)
    sections = {"predictions": predictions_table(figures), "runs": runs_section(runs, figures)}
    for name, text in sections.items():
        begin, end = MARKERS[name]
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE.name} must have these lines once: {begin!r} and {end!r}")
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="results.json of further runs")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is not current")
    given = parser.parse_args()
    for path in given.results:
        if not path.exists():
            parser.error(f"there is no file {path}")
    further = [read_runs(path) for path in given.results]
    if any(run.card == "rehearsal" for runs in further for run in runs):
        parser.error("a rehearsal's figures mean nothing")
    runs = merge_runs(read_runs(RESULTS), *further)
    page = PAGE.read_text()
    renewed = renew(page, runs)
    if given.check:
        return 0 if renewed == page else 1
    if further:
        write_runs(RESULTS, runs)
    PAGE.write_text(renewed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
