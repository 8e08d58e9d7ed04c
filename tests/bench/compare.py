"""Compare servers: run the same workloads on several of them in turns (A B A B ...).

Run: PYTHONPATH=tests python -m bench.compare SERVER ... [--peer NAME[:LABEL]=PROGRAM[,MODEL] ...] --model DIR
SERVER is `serve-llm` (from this environment, without drafts), NAME=URL, or NAME=COMMAND with {port}, perhaps {model}:

    PYTHONPATH=tests python -m bench.compare serve-llm old='/old/bin/serve-llm {model} --port {port}' --model DIR
    PYTHONPATH=tests python -m bench.compare serve-llm --peer vllm=/peers/vllm/bin/python --model DIR --poisson 0.6

Each server is started once, warmed up, and suspended with SIGSTOP while another one is measured, so that a server that
busy-waits does not slow the others; with --alone, only one exists at a time. In a turn all servers get the same
prompts; each turn uses new ones, so that no prefix cache holds them. --workloads W1 W3:1 runs W3 in the first turn
only. Ratios are computed within a turn; the tables give the median over the turns, the minimum and the maximum.
--poisson 0.6 adds W2's lengths at random times, at 0.6 of the request rate that the same server reached on W2. --texts
sends the texts of bench.speculation in one stream instead, to compare drafts: give the commands of servers with and
without them. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench import draft_texts, load
from bench.load import Result, single_words
from bench.servers import Recipe, Server, StartError, named, peer, running, stop_on_signals
from bench.workloads import WARM, WORKLOADS, Workload
from serve_llm.common.errors import ModelError
from serve_llm.common.hub import resolve_model

# The compared figures: heading, field, format. For the first one more is better, for the others less.
FIGURES: tuple[tuple[str, Callable[[Result], float], str], ...] = (
    ("output tokens/s", lambda result: result.tokens_per_second, "{:.1f}"),
    ("first token, ms", lambda result: 1e3 * result.ttft_p50, "{:.0f}"),
    ("between tokens p99, ms", lambda result: 1e3 * result.itl_p99, "{:.0f}"),
)


def spread(values: Sequence[float], form: str) -> str:
    """Format the median, the minimum and the maximum."""
    middle = form.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))}-{form.format(max(values))})"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios turn by turn; NaN where the divisor is missing."""
    return [value / other if other else float("nan") for value, other in zip(values, others, strict=True)]


def best_peer(found: Mapping[str, Sequence[float]], first: str, more_is_better: bool) -> str | None:
    """Return the best server by the median, except the first."""
    medians = {name: statistics.median(values) for name, values in found.items() if name != first}
    if not medians:
        return None
    return max(medians, key=lambda name: medians[name] if more_is_better else -medians[name])


def table(workload: str, results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Format one workload. results: per server, the first one first, turn by turn."""
    first = next(iter(results))
    lines = [f"\n{workload}"]
    rows = [["", *(heading for heading, _, _ in FIGURES), f"tokens/s to {first}", "client"]]
    for name, turns in results.items():
        cells = [spread([figure(turn) for turn in turns], form) for _, figure, form in FIGURES]
        speeds = [turn.tokens_per_second for turn in turns]
        to_first = ratios(speeds, [turn.tokens_per_second for turn in results[first]])
        busy = f"{max(turn.client_cores for turn in turns):.1%}"
        rows.append([name, *cells, spread(to_first, "{:.2f}"), busy])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for number, (heading, figure, _) in enumerate(FIGURES):
        found = {name: [figure(turn) for turn in turns] for name, turns in results.items()}
        best = best_peer(found, first, more_is_better=number == 0)
        if best is not None:
            to_best = spread(ratios(found[first], found[best]), "{:.2f}")
            lines.append(f"{heading}: {first} to {best}, the best of the others: {to_best}")
    for name, turns in results.items():
        wrong = next((turn for turn in turns if turn.errors or turn.short), None)
        if wrong is not None:
            lines.append(f"{name}: {wrong.errors} errors ({wrong.first_error}), {wrong.short} replies too short")
    return lines


class Comparison:
    """Runs workloads and collects the results: workload -> server -> one result per turn."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        workloads: Sequence[tuple[Workload, int]],
        poisson: float | None,
        ids: Sequence[int],
        words: Mapping[int, str],
    ) -> None:
        """workloads: each with its number of turns."""
        self.recipes, self._poisson, self._ids, self._words = recipes, poisson, ids, words
        self._workloads = {workload.name: workload for workload, _ in workloads}
        self._turns = {workload.name: turns for workload, turns in workloads}
        if poisson:
            self._turns[f"W2 at {poisson:g}"] = self._turns["W2"]
        self.results: dict[str, dict[str, list[Result]]] = {
            workload: {recipe.name: [] for recipe in recipes} for workload in self._turns
        }
        self.starts: dict[str, dict[str, list[float]]] = {recipe.name: {} for recipe in recipes}

    def due(self, turn: int) -> list[str]:
        """Return the workloads that have this turn."""
        return [name for name in self.results if turn < self._turns[name]]

    def together(self) -> None:
        """Start all servers at once; only the one being measured runs."""
        with contextlib.ExitStack() as stack:
            servers = []
            for recipe in self.recipes:
                server = stack.enter_context(self._started(recipe))
                server.pause()
                servers.append(server)
            for turn in range(max(self._turns.values())):
                for workload in self.due(turn):
                    for server in servers:
                        server.resume()
                        self._measure(server, workload, turn)
                        server.pause()

    def alone(self) -> None:
        """Start and stop each server in each turn, so that only one exists at a time."""
        for turn in range(max(self._turns.values())):
            for recipe in self.recipes:
                with self._started(recipe) as server:
                    for workload in self.due(turn):
                        self._measure(server, workload, turn)

    @contextlib.contextmanager
    def _started(self, recipe: Recipe) -> Iterator[Server]:
        with running(recipe) as server:
            if recipe.command:
                facts = {
                    "start_seconds": server.start_seconds,
                    "resident_mb": server.resident_bytes() / 1e6,
                    "idle_cores": server.idle_cores(),
                }
                for name, value in facts.items():
                    self.starts[recipe.name].setdefault(name, []).append(value)
            self._load(server, WARM, 0)
            yield server

    def _measure(self, server: Server, workload: str, turn: int) -> None:
        rate = None
        if workload not in self._workloads:  # arrivals at a share of this server's capacity
            before = self.results["W2"][server.name][-1]
            rate = self._poisson * before.requests / before.seconds if self._poisson else None
        other_prompts = replace(WORKLOADS["W2"], name=workload)  # prompts that are in no prefix cache
        result = self._load(server, self._workloads.get(workload, other_prompts), turn, rate)
        self.results[workload][server.name].append(result)
        sys.stderr.write(f"turn {turn + 1}: {workload} {server.name:14} {load.line(result)}\n")

    def _load(self, server: Server, workload: Workload, turn: int, rate: float | None = None) -> Result:
        return load.run(server.url, workload, turn, self._ids, rate, self._words if server.takes_text else None)

    def report(self) -> list[str]:
        lines = [f"{'':14} exec to first token   resident, idle   cores, idle"]
        for name, facts in self.starts.items():
            if facts:
                cells = spread(facts["start_seconds"], "{:.1f}"), spread(facts["resident_mb"], "{:.0f}")
                lines.append(f"{name:14} {cells[0] + ' s':21} {cells[1] + ' MB':16} {max(facts['idle_cores']):.3f}")
        for workload, results in self.results.items():
            lines += table(workload, results)
        return lines


def find_workloads(
    texts: str | None, names: Sequence[str] | None, model: str, turns: int
) -> list[tuple[Workload, int]]:
    """Return the workloads NAME or NAME:TURNS with their turns; None: the usual ones. Raises ValueError."""
    known, usual = WORKLOADS, ["W1", "W2", "W3", "W4"]
    if texts is not None:
        known = draft_texts.make_workloads(texts, Path(resolve_model(model)) / "tokenizer.json")
        usual = list(known)
    found = {}
    for text in usual if names is None else names:
        name, colon, count = text.partition(":")
        if name not in known:
            raise ValueError(f"--workloads: {name!r} is not known; there are {', '.join(sorted(known))}")
        if colon and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"--workloads {text}: the turns of a workload must be at least 1")
        found[name] = known[name], int(count) if colon else turns
    return list(found.values())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="SERVER")
    parser.add_argument("--model", required=True, help="the checkpoint that the servers load")
    parser.add_argument(
        "--peer", action="append", default=[], help="vllm, openvino, llama-cpp or transformers: see above"
    )
    parser.add_argument("--workloads", nargs="+", metavar="NAME[:TURNS]", help="default: W1 W2 W3 W4, or all texts")
    parser.add_argument("--texts", choices=draft_texts.TEXTS, help="send these texts of bench.speculation, one stream")
    parser.add_argument(
        "--poisson", type=float, metavar="SHARE", help="also run W2 at random times, at this share of its rate"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="start and stop each server in each turn")
    parser.add_argument("--ids", type=load.id_range, default=load.IDS, help="token ids of prompts (300:31000)")
    parser.add_argument("--threads", type=int, default=2, help="threads for peers that do not choose them (default: 2)")
    given = parser.parse_args(arguments)
    if given.turns < 1 or given.threads < 1:
        parser.error("--turns and --threads must be at least 1")
    try:
        given.workloads = find_workloads(given.texts, given.workloads, given.model, given.turns)
    except (ValueError, ModelError) as error:
        parser.error(str(error))
    names = [workload.name for workload, _ in given.workloads]
    if given.poisson is not None and not (0 < given.poisson <= 1 and "W2" in names):
        parser.error("--poisson wants a share above 0 and up to 1, and W2 among the workloads")
    try:
        given.recipes = [named(text, given.model) for text in given.servers]
        given.recipes += [peer(text, given.model, given.threads) for text in given.peer]
    except ValueError as error:
        parser.error(str(error))
    if not given.recipes:
        parser.error("name at least one SERVER or --peer")
    if len({recipe.name for recipe in given.recipes}) < len(given.recipes):
        parser.error("every server needs a name of its own")
    if given.texts and any(recipe.takes_text for recipe in given.recipes):
        parser.error("--texts needs servers that accept token ids; transformers does not")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    stop_on_signals()
    ids, words = given.ids, {}
    if any(recipe.takes_text for recipe in given.recipes):  # then all servers get prompts of the same words
        words = single_words(Path(given.model) / "tokenizer.json")
        ids = [token_id for token_id in ids if token_id in words]
    comparison = Comparison(given.recipes, given.workloads, given.poisson, ids, words)
    try:
        (comparison.alone if given.alone else comparison.together)()
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:  # the servers have been stopped
        return 130
    print("\n".join(comparison.report()))
    print(json.dumps({"starts": comparison.starts, "results": msgspec.to_builtins(comparison.results)}))
    wrong = any(turn.errors for found in comparison.results.values() for turns in found.values() for turn in turns)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
