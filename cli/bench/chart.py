"""Plots of a benchmark in one SVG file, which a browser shows in its light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from serve_llm.common.errors import OptionError

WIDTH, HEIGHT = 460, 280  # pixels of one chart
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 48, 44  # margins around the area of the line
PER_ROW = 2
TITLE_HEIGHT = 36
MAX_TICKS = 6
STYLE = """
svg { background: #fff; color: #1b1b1f; font: 12px sans-serif; }
text { fill: currentColor; }
.heading { font-size: 15px; font-weight: bold; }
.grid { stroke: #8886; stroke-width: 1; }
.line { fill: none; stroke: #1a56c4; stroke-width: 2; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) { svg { background: #18181b; color: #eee; } .line { stroke: #8ab4ff; } }
"""


@dataclass(frozen=True)
class Chart:
    """A line through points; both axes start at 0."""

    title: str
    x_title: str
    y_title: str
    points: Sequence[tuple[float, float]]


def chart_distribution(title: str, milliseconds: Sequence[float]) -> Chart:
    """Return the share of values up to each value, in percent."""
    ordered = sorted(milliseconds)
    points = [(value, 100 * (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    return Chart(title, "ms", "% at most", [(ordered[0], 0.0), *points] if ordered else [])


def chart_rate(title: str, y_title: str, events: Sequence[tuple[float, float]], seconds: float) -> Chart:
    """Return amounts per second over the seconds of a run. events: (second, amount)."""
    parts = 60
    width = seconds / parts
    amounts = [0.0] * parts
    for second, amount in events:
        amounts[min(int(second / width), parts - 1)] += amount
    return Chart(title, "s", y_title, [((part + 0.5) * width, amounts[part] / width) for part in range(parts)])


def chart_open(title: str, spans: Sequence[tuple[float, float]]) -> Chart:
    """Return the number of open spans over time. spans: start and end of each, in seconds."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    points = [(0.0, 0.0)]
    for second, change in changes:
        count = points[-1][1]
        points += [(second, count), (second, count + change)]
    return Chart(title, "s", "open", points)


def write_charts(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Raises OptionError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_charts(title, charts))
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from None


def draw_charts(title: str, charts: Sequence[Chart]) -> bytes:
    """Return an SVG document."""
    rows = math.ceil(len(charts) / PER_ROW)
    width = PER_ROW * WIDTH
    height = TITLE_HEIGHT + rows * HEIGHT
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", role="img")
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE
    _write(root, LEFT, 24, title, "start").set("class", "heading")
    for number, chart in enumerate(charts):
        x = number % PER_ROW * WIDTH
        y = TITLE_HEIGHT + number // PER_ROW * HEIGHT
        _draw_chart(SubElement(root, "g", transform=f"translate({x} {y})"), chart)
    document: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return document


def _draw_chart(group: Element, chart: Chart) -> None:
    _write(group, LEFT, 20, chart.title, "start").set("class", "heading")
    bottom = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    if not chart.points:
        _write(group, (LEFT + right) / 2, (TOP + bottom) / 2, "nothing measured", "middle")
        return
    x_ticks = list(find_ticks(max(x for x, _ in chart.points)))
    y_ticks = list(find_ticks(max(y for _, y in chart.points)))
    x_scale = (right - LEFT) / x_ticks[-1]
    y_scale = (bottom - TOP) / y_ticks[-1]
    for tick in x_ticks:
        x = LEFT + tick * x_scale
        SubElement(group, "path", {"class": "grid", "d": f"M{x:.1f} {TOP}V{bottom}"})
        _write(group, x, bottom + 16, f"{tick:,g}", "middle")
    for tick in y_ticks:
        y = bottom - tick * y_scale
        SubElement(group, "path", {"class": "grid", "d": f"M{LEFT} {y:.1f}H{right}"})
        _write(group, LEFT - 6, y + 4, f"{tick:,g}", "end")
    _write(group, right, bottom + 34, chart.x_title, "end")
    _write(group, LEFT, TOP - 10, chart.y_title, "end")
    places = [f"{LEFT + x * x_scale:.1f} {bottom - y * y_scale:.1f}" for x, y in chart.points]
    SubElement(group, "path", {"class": "line", "d": "M" + "L".join(places)})


def _write(parent: Element, x: float, y: float, text: str, anchor: str) -> Element:
    element = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    element.text = text
    return element


def find_ticks(highest: float) -> Iterator[float]:
    """Yield round tick values from 0 to at least `highest`, at most MAX_TICKS + 1 of them; 0 and 1 for 0."""
    if highest <= 0:
        yield from (0.0, 1.0)
        return
    power = 10.0 ** math.floor(math.log10(highest / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if highest <= power * factor * MAX_TICKS)
    for number in range(math.ceil(round(highest / step, 9)) + 1):
        yield number * step
