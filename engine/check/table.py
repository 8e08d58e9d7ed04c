"""The results as text: a table of hosts, a table of pairs, the all-reduces, and what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.engine.check.findings import Findings, Results, size_text
from serve_llm.engine.check.host import HostReport


def render(results: Results, findings: Findings) -> str:
    """The whole report, one string of several lines."""
    reports = [results.hosts[rank] for rank in sorted(results.hosts)]
    parts = [_columns([_HOST_TITLES, *(_host_row(results, report) for report in reports)])]
    if len(results.hosts) > 1:
        parts.append(_columns([_PAIR_TITLES, *_pair_rows(results)]))
    parts += [_collectives(results)] if results.collectives else []
    if findings.notes:
        parts.append("\n".join(f"note: {line}" for line in findings.notes))
    if findings.problems:
        parts.append("\n".join(f"PROBLEM: {line}" for line in findings.problems))
    else:
        parts.append("No problem found." if len(reports) == 1 else f"No problem found between {len(reports)} hosts.")
    return "\n\n".join(parts)


_HOST_TITLES = [
    *("node", "host", "address", "interface", "MTU", "/dev/shm", "files", "memlock", "cores", "GPUs"),
    *("clock", "serve-llm", "python", "torch", "model"),
]


def _host_row(results: Results, report: HostReport) -> list[str]:
    print_ = report.fingerprint
    locked = "any" if report.locked_memory < 0 else size_text(report.locked_memory)
    files = "any" if report.open_files < 0 else str(report.open_files)
    clock = f"{round(results.clocks[report.rank] * 1000):+d} ms" if report.rank in results.clocks else "-"
    model = "missing" if report.model_error else print_.weights or "-"
    return [
        *(str(report.rank), report.name, report.address, report.interface, str(report.mtu)),
        *(size_text(report.shm_bytes), files, locked, str(report.cores), str(report.gpus)),
        *(clock, print_.serve_llm, print_.python, print_.torch, model),
    ]


_PAIR_TITLES = ["from", "to", "connect", "large packets", "round trip", "bandwidth"]


def _pair_rows(results: Results) -> list[list[str]]:
    rates = {(one.source, one.target): one.there for one in results.speeds if not one.failure}
    rates |= {(one.target, one.source): one.back for one in results.speeds if not one.failure}
    trips = {(one.source, one.target): one.latency_us for one in results.speeds if not one.failure}
    rows = []
    for reach in sorted(results.reaches, key=lambda reach: (reach.source, reach.target)):
        pair = (reach.source, reach.target)
        large = "-" if reach.failure else f"lost over {reach.path_mtu}" if reach.large_lost else "ok"
        trip = trips.get(pair) or trips.get(pair[::-1])
        rows.append(
            [
                *(str(reach.source), str(reach.target), reach.failure or "ok", large),
                *(f"{trip:.0f} us" if trip else "-", f"{size_text(rates[pair])}/s" if pair in rates else "-"),
            ]
        )
    return rows


def _collectives(results: Results) -> str:
    """The slowest host's times: the others wait for it."""
    lines = []
    found = [one for every in results.collectives.values() for one in every]
    for backend in dict.fromkeys(one.backend for one in found):
        these = [one for one in found if one.backend == backend]
        if any(one.error for one in these):
            lines.append(f"{backend} all-reduce: FAILED")
            continue
        small, large = max(one.small_us for one in these), min(one.large for one in these)
        over = f" over {these[0].transport}" if these[0].transport else ""
        lines.append(f"{backend} all-reduce{over}: exact; 16 KiB in {small:.0f} us, 4 MiB at {size_text(large)}/s")
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
