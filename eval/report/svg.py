"""Small charts as inline SVG, without a library: intervals, grouped bars, lines.

Colours come from CSS classes (`s-head`, `s-ngram`, …; see report.html.j2), so one drawing serves the light and the dark page; text is
`currentColor`. Every drawing scales to its column: coordinates are those of a 460-wide canvas, the width of a phone's screen and a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 460
LABEL = 100  # room for the row labels on the left
ROW = 15


@dataclass(frozen=True)
class Point:
    """One mark of a row: which series (a CSS class), its value, and an interval if there is one."""

    series: str
    value: float | None
    low: float | None = None
    high: float | None = None


def intervals(title: str, rows: Sequence[tuple[str, Sequence[Point]]], *, reference: float | None = 1.0, unit: str = "×") -> Markup:
    """Rows of dots with whiskers, one line per series, over a common axis; a dashed line at `reference`."""
    values = [v for _, points in rows for p in points for v in (p.value, p.low, p.high) if v is not None]
    low, high, ticks = _axis([*values, *([reference] if reference is not None else [])], zero=False)
    x = _scale(low, high)
    body, y = [], 8.0
    for label, points in rows:
        drawn = [p for p in points if p.value is not None]
        height = max(1, len(drawn)) * ROW
        body.append(_label(label, y + height / 2))
        for i, p in enumerate(drawn):
            middle = y + ROW * (i + 0.5)
            tip = f"{label}, {p.series}: {p.value:.2f}{unit}"
            if p.low is not None and p.high is not None:
                tip += f" ({p.low:.2f} to {p.high:.2f})"
                body.append(f'<line class="s-{_css(p.series)} whisker" x1="{x(p.low):.1f}" x2="{x(p.high):.1f}" y1="{middle}" y2="{middle}"/>')
            dot = f'<circle class="s-{_css(p.series)} dot" cx="{x(p.value or 0):.1f}" cy="{middle}" r="4">'
            body.append(f"{dot}<title>{escape(tip)}</title></circle>")
        y += height + 9
    return _frame(title, body, ticks, x, y, reference, unit)


def bars(title: str, rows: Sequence[tuple[str, Sequence[Point]]], *, reference: float | None = None, unit: str = "") -> Markup:
    """Grouped horizontal bars from zero, the value written at the end of each."""
    values = [p.value for _, points in rows for p in points if p.value is not None]
    low, high, ticks = _axis([0.0, *values, *([reference] if reference is not None else [])], zero=True)
    x = _scale(low, high, right=34)
    body, y = [], 8.0
    for label, points in rows:
        drawn = [p for p in points if p.value is not None]
        height = max(1, len(drawn)) * ROW
        body.append(_label(label, y + height / 2))
        for i, p in enumerate(drawn):
            top, end = y + ROW * i + 1, x(p.value or 0)
            body.append(
                f'<rect class="s-{_css(p.series)} bar" x="{x(0):.1f}" y="{top:.1f}" width="{max(end - x(0), 0.5):.1f}" height="{ROW - 3}" rx="2">'
                f"<title>{escape(label)}, {escape(p.series)}: {p.value:.3f}{unit}</title></rect>"
                f'<text x="{end + 4:.1f}" y="{top + ROW - 5:.1f}" class="small">{p.value:.2f}{unit}</text>'
            )
        y += height + 9
    return _frame(title, body, ticks, x, y, reference, unit)


def lines(title: str, series: Mapping[str, Sequence[float | None]], *, x_name: str) -> Markup:
    """One line per series over 1, 2, 3, … with values between 0 and 1."""
    longest = max((len(v) for v in series.values()), default=0)
    left, right, top, bottom = 40.0, 12.0, 10.0, 170.0
    step = (WIDTH - left - right) / max(1, longest - 1)

    def at(i: int, value: float) -> tuple[float, float]:
        return left + i * step, bottom - value * (bottom - top)

    body = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = at(0, tick)[1]
        body.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    for i in range(longest):
        body.append(f'<text class="small" x="{at(i, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{i + 1}</text>')
    body.append(f'<text class="small" x="{(WIDTH + left) / 2:.1f}" y="{bottom + 33}" text-anchor="middle">{escape(x_name)}</text>')
    for name, values in series.items():
        points = [(i, *at(i, v)) for i, v in enumerate(values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in points)
        body.append(f'<polyline class="s-{_css(name)} line" points="{path}"/>')
        body += [
            f'<circle class="s-{_css(name)} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(name)}, {i + 1}: {values[i]:.1%}</title></circle>'
            for i, x, y in points
        ]
    return _svg(title, body, bottom + 42)


def _frame(
    title: str, body: list[str], ticks: Sequence[float], x: Scale, bottom: float, reference: float | None, unit: str
) -> Markup:
    axis = []
    for tick in ticks:
        axis.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="2" y2="{bottom:.1f}"/>')
        axis.append(f'<text class="small" x="{x(tick):.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{tick:g}{unit}</text>')
    if reference is not None:
        axis.append(f'<line class="reference" x1="{x(reference):.1f}" x2="{x(reference):.1f}" y1="2" y2="{bottom:.1f}"/>')
    return _svg(title, axis + body, bottom + 22)


def _svg(title: str, body: list[str], height: float) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def _label(text: str, y: float) -> str:
    short = text if len(text) <= 14 else text[:13] + "…"
    return f'<text x="{LABEL - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(short)}<title>{escape(text)}</title></text>'


class Scale:
    """Value → x coordinate."""

    def __init__(self, low: float, high: float, right: float) -> None:
        self.low, self.factor = low, (WIDTH - LABEL - right) / (high - low)

    def __call__(self, value: float) -> float:
        return LABEL + (value - self.low) * self.factor


def _scale(low: float, high: float, right: float = 14) -> Scale:
    return Scale(low, high, right)


def _axis(values: Sequence[float], *, zero: bool) -> tuple[float, float, list[float]]:
    """Rounded ends and 3–6 round ticks that cover the values."""
    low, high = (0.0 if zero else min(values, default=0.0)), max(values, default=1.0)
    if high <= low:
        high = low + 1
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return first * step, last * step, [round(i * step, 10) for i in range(first, last + 1)]


def _css(name: str) -> str:
    """A class name cannot carry anything but letters, digits and hyphens into the page."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)
