"""Draw the Grafana dashboards in deploy/ with data from a real server, without Grafana.

    python tools/dashboard_picture.py URL [--output dashboard.html]     needs the program prometheus
    python tools/dashboard_picture.py                                   also needs the extra `dev` and chromium

Prometheus scrapes the server for --seconds; then the queries of every panel run. Put load on the server meanwhile.
Without a URL, the program draws the picture in docs/metrics.md: it starts a server with the demo model, loads it, and
fails if a query returns no data.
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.dashboard_panels import DASHBOARDS, PROMETHEUS, Panel, Prometheus, Series, read_panels  # noqa: E402

UID = "serve-llm"
IMAGE = ROOT / "docs" / "images" / "dashboard.png"
LOAD_SECONDS = 90.0
COLUMN_PIXELS, ROW_PIXELS, GAP_PIXELS, HEAD_PIXELS = 50, 24, 6, 64
MAX_LEGENDS = 4
COLOURS = ("#5794f2", "#ff9830", "#73bf69", "#b877d9", "#f2495c", "#37872d", "#fade2a", "#8ab8ff")
STYLE = f"""
body {{ margin: 0; width: {24 * COLUMN_PIXELS}px; background: #f4f5f5; color: #24292e; font: 12px sans-serif; }}
header {{ padding: 10px 8px 0; height: {HEAD_PIXELS - 10}px; box-sizing: border-box; }}
header b {{ font-size: 16px; }}
.row, .panel {{ position: absolute; box-sizing: border-box; overflow: hidden; }}
.row {{ padding: 4px 8px; font-weight: bold; font-size: 14px; }}
.panel {{ padding: 6px 8px; background: #fff; border: 1px solid #dcdcde; border-radius: 3px; }}
.panel > b {{ display: block; white-space: nowrap; }}
.panel small {{ float: right; color: #6e7075; }}
svg {{ display: block; width: 100%; border-bottom: 1px solid #dcdcde; margin: 4px 0; }}
path {{ fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }}
span {{ display: inline-block; max-width: 100%; margin-right: 10px; overflow: hidden; white-space: nowrap; }}
i {{ display: inline-block; width: 10px; height: 3px; margin-right: 4px; vertical-align: middle; }}
"""


def format_value(value: float, unit: str) -> str:
    """Format a value as Grafana would. unit: Grafana's name for it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        power = 0
        while value >= 1024 and power < 3:
            value /= 1024
            power += 1
        suffix = ("B", "KiB", "MiB", "GiB")[power]
        return f"{value:.3g} {suffix}{'/s' if unit == 'Bps' else ''}"
    return f"{value:.3g}{'/s' if unit in ('reqps', 'cps') else ''}"


def split_at_gaps(points: list[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Split points into runs without gaps: neighbours in a run are one second apart."""
    run: list[tuple[float, float]] = []
    for point in points:
        if run and point[0] - run[-1][0] > 1.5:
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def draw_series(lines: list[Series], start: float, end: float, highest: float, height: int) -> str:
    """Draw an SVG with one path per series. start, end: Unix seconds. height: pixels."""
    paths = []
    for number, line in enumerate(lines):
        parts = []
        for run in split_at_gaps(line.points):
            places = [
                f"{1000 * (when - start) / (end - start):.1f} {98 - 96 * value / highest:.2f}" for when, value in run
            ]
            parts.append("M" + " L".join(places if len(places) > 1 else 2 * places))
        paths.append(f'<path d="{" ".join(parts)}" stroke="{COLOURS[number % len(COLOURS)]}"/>')
    box = 'viewBox="0 0 1000 100" preserveAspectRatio="none"'
    return f'<svg {box} style="height:{height}px">{"".join(paths)}</svg>'


def draw_panel(panel: Panel, start: float, end: float) -> str:
    place = panel.panel["gridPos"]
    left, top = COLUMN_PIXELS * place["x"], ROW_PIXELS * place["y"] + HEAD_PIXELS
    width, height = COLUMN_PIXELS * place["w"] - GAP_PIXELS, ROW_PIXELS * place["h"] - GAP_PIXELS
    box = f"left:{left + GAP_PIXELS // 2}px;top:{top}px;width:{width}px;height:{height}px"
    title = html.escape(panel.panel["title"])
    if panel.panel["type"] == "row":
        return f'<div class="row" style="{box}">{title}</div>'
    unit = panel.panel["fieldConfig"]["defaults"].get("unit", "short")
    lines = [line for series in panel.series.values() for line in series if line.points]
    if not lines:
        return f'<div class="panel" style="{box}"><b>{title}</b><p>No data</p></div>'
    highest = max(value for line in lines for _, value in line.points)
    legends = [
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        f"{html.escape(line.legend)} {format_value(line.points[-1][1], unit)}</span>"
        for number, line in enumerate(lines[:MAX_LEGENDS])
    ]
    if len(lines) > MAX_LEGENDS:
        legends.append(f"<span>and {len(lines) - MAX_LEGENDS} more</span>")
    picture = draw_series(lines, start, end, highest or 1.0, height - 80)
    limit = f"<small>0 to {format_value(highest, unit)}</small>"
    return f'<div class="panel" style="{box}">{limit}<b>{title}</b>{picture}{"".join(legends)}</div>'


def draw_page(panels: list[Panel], note: str) -> str:
    """Render the page. note: describes the server. Raises SystemExit if no panel has data."""
    times = [when for panel in panels for series in panel.series.values() for line in series for when, _ in line.points]
    if not times:
        raise SystemExit("Prometheus has no data of the server: is the URL right, and does it ask for a key?")
    start, end = min(times), max(times)
    height = HEAD_PIXELS + ROW_PIXELS * max(one.panel["gridPos"]["y"] + one.panel["gridPos"]["h"] for one in panels)
    note = (
        f"{end - start:.0f} seconds of {note}. Drawn by tools/dashboard_picture.py from the dashboard's JSON and "
        "Prometheus' answers to its queries, not by Grafana."
    )
    body = "".join(draw_panel(panel, start, end) for panel in panels)
    head = f"<header><b>deploy/grafana/{panels[0].uid}.json</b><br>{html.escape(note)}</header>"
    style = f'<meta charset="utf-8"><style>{STYLE}</style>'
    return f'<!doctype html>{style}<body style="height:{height}px">{head}{body}</body>'


def watch(url: str, seconds: float, api_key: str | None) -> list[Panel]:
    """Let Prometheus scrape the server at the URL for some time, then draw all panels."""
    if PROMETHEUS is None:
        raise SystemExit("needs the program prometheus; on Debian: apt-get install prometheus")
    with tempfile.TemporaryDirectory() as directory, Prometheus(url, Path(directory), api_key) as prometheus:
        start = time.time()
        time.sleep(seconds)
        return read_panels(prometheus, start)


def watch_demo() -> list[Panel]:
    from support.dashboard_data import run_under_load

    with tempfile.TemporaryDirectory() as directory, run_under_load(Path(directory), LOAD_SECONDS) as panels:
        empty = [query for panel in panels for query in panel.empty_queries]
        if empty:
            raise SystemExit("without data: " + "; ".join(empty))
        return panels


def write_picture(page_text: str, path: Path) -> None:
    """Write the page as HTML, or as a PNG rendered by Chromium, depending on the path's suffix."""
    if path.suffix == ".html":
        path.write_text(page_text, encoding="utf-8")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 24 * COLUMN_PIXELS, "height": 800})
        page.set_content(page_text)
        page.screenshot(path=path, full_page=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a Grafana dashboard with the data of a server.")
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="a running server (default: start one for the docs' picture)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML or PNG (default: dashboard.html)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to scrape the server (default: 20)")
    uids = [path.stem for path in sorted(DASHBOARDS.glob("*.json"))]
    parser.add_argument("--dashboard", choices=uids, default=UID, help=f"which one (default: {UID})")
    options = parser.parse_args()
    if options.url is None:
        panels, note = watch_demo(), "a server with the demo model and two engines, of which one was killed"
        path = options.output or IMAGE
    else:
        panels, note = watch(options.url, options.seconds, os.environ.get("SERVE_LLM_API_KEY")), options.url
        path = options.output or Path("dashboard.html")
    write_picture(draw_page([panel for panel in panels if panel.uid == options.dashboard], note), path)
    print(path)


if __name__ == "__main__":
    main()
