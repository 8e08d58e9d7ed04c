"""Format the results as text: hosts, pairs, all-reduces, notes and problems."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.cli.check.findings import Findings, Results, format_bytes
from serve_llm.cli.check.host import HostReport

_HOST_TITLES = [
    "node",
    "host",
    "address",
    "interface",
    "MTU",
    "/dev/shm",
    "files",
    "memlock",
    "cores",
    "GPUs",
    "clock",
    "serve-llm",
    "python",
    "torch",
    "model",
]
_PAIR_TITLES = ["from", "to", "connect", "large packets", "round trip", "bandwidth"]


def render(results: Results, findings: Findings) -> str:
    """The whole report, several lines."""
    reports = [results.hosts[rank] for rank in sorted(results.hosts)]
    parts = [_align([_HOST_TITLES, *(_format_host(results, report) for report in reports)])]
    if len(reports) > 1:
        parts.append(_align([_PAIR_TITLES, *_format_pairs(results)]))
    if results.collectives:
        parts.append(_format_collectives(results))
    if findings.notes:
        parts.append("\n".join(f"note: {line}" for line in findings.notes))
    if findings.problems:
        parts.append("\n".join(f"PROBLEM: {line}" for line in findings.problems))
    else:
        parts.append("No problem found." if len(reports) == 1 else f"No problem found between {len(reports)} hosts.")
    return "\n\n".join(parts)


def _format_host(results: Results, report: HostReport) -> list[str]:
    fingerprint = report.fingerprint
    has_clock = report.rank in results.clocks
    return [
        str(report.rank),
        report.name,
        report.address,
        report.interface,
        str(report.mtu),
        format_bytes(report.shm_bytes),
        "any" if report.open_files < 0 else str(report.open_files),
        "any" if report.locked_memory < 0 else format_bytes(report.locked_memory),
        str(report.cores),
        str(report.gpus),
        f"{round(results.clocks[report.rank] * 1000):+d} ms" if has_clock else "-",
        fingerprint.serve_llm,
        fingerprint.python,
        fingerprint.torch,
        "missing" if report.model_error else fingerprint.weights or "-",
    ]


def _format_pairs(results: Results) -> list[list[str]]:
    speeds = {(speed.source, speed.target): speed for speed in results.speeds if not speed.failure}
    rows = []
    for reach in sorted(results.reaches, key=lambda reach: (reach.source, reach.target)):
        speed = speeds.get((reach.source, reach.target))
        large = "-" if reach.failure else f"lost over {reach.path_mtu}" if reach.large_lost else "ok"
        rows.append(
            [
                str(reach.source),
                str(reach.target),
                reach.failure or "ok",
                large,
                f"{speed.latency_us:.0f} us" if speed else "-",
                f"{format_bytes(speed.bandwidth)}/s" if speed else "-",
            ]
        )
    return rows


def _format_collectives(results: Results) -> str:
    """The times of the slowest host, for which the others wait."""
    lines = []
    all_results = [result for rank_results in results.collectives.values() for result in rank_results]
    for backend in dict.fromkeys(result.backend for result in all_results):
        same = [result for result in all_results if result.backend == backend]
        if any(result.error for result in same):
            lines.append(f"{backend} all-reduce: FAILED")
            continue
        small = max(result.small_us for result in same)
        large = min(result.large for result in same)
        over = f" over {same[0].transport}" if same[0].transport else ""
        lines.append(f"{backend} all-reduce{over}: exact; 16 KiB in {small:.0f} us, 4 MiB at {format_bytes(large)}/s")
    return "\n".join(lines)


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
