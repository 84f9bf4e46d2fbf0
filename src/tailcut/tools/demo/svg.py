"""Draws charts as SVG that takes its colours from the page around it: ``.gloo``, ``.grid``, ``.ink`` ..."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tailcut.tools.demo.charts import Bars, Chart, Curve, Lines, Matrix

WIDE, NARROW = 760, 340
"""Widths, in pixels, of the two drawings of a chart: for a laptop and for a phone."""
TEXT, LINE = 12.5, 17
"""Sizes of text and distance of its lines, in pixels."""
LEVEL_GAP = 5
LETTER = 7.6
"""About the width of a bold letter."""


def draw(chart: Chart, width: int) -> str:
    if isinstance(chart, Lines):
        return _lines(chart, width)
    return _bars(chart, width) if isinstance(chart, Bars) else _matrix(chart, width)


class Sheet:
    """An SVG that grows by elements."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._head = (
            f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title, quote=True)}" '
            'xmlns="http://www.w3.org/2000/svg">'
        )
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "ink", anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def path(self, points: Sequence[tuple[float, float]], style: str) -> None:
        if points:
            words = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._parts.append(f'<polyline points="{words}" class="curve {style}"/>')

    def dot(self, x: float, y: float, style: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot {style}"/>')

    def box(self, x: float, y: float, width: float, height: float, style: str, opacity: float = 1.0) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{style}" '
            f'fill-opacity="{opacity:.2f}"/>'
        )

    def __str__(self) -> str:
        return self._head + "".join(self._parts) + "</svg>"


def _lines(chart: Lines, width: int) -> str:
    labels = [curve for curve in chart.curves if curve.label and curve.points]
    left, top, bottom = 46.0, 12.0, 40.0
    # Names stand at the ends of the curves where there is room and the ends are apart.
    beside = width >= WIDE and not any(curve.marks for curve in labels)
    right = 12 + LETTER * max((len(curve.label) for curve in labels), default=0) if beside else 22.0
    above = 0.0 if beside else 4 + LINE * len(labels)
    height = (330 if width >= WIDE else 260) + above
    sheet = Sheet(width, height, chart.title)
    values = [y for curve in chart.curves for _, y in curve.points]
    values += [chart.level[0]] if chart.level else []
    at_times = [x for curve in chart.curves for x, _ in curve.points] or [1.0]
    low_y, high_y = _range_y(values, chart)
    low_x, high_x = (
        (max(min(at_times) * 0.9, 1e-3), max(at_times) * 1.1) if chart.log_x else (0.0, max(at_times))
    )

    def place(x: float, y: float) -> tuple[float, float]:
        share = (
            math.log(max(x, low_x) / low_x) / math.log(high_x / low_x) if chart.log_x else x / (high_x or 1.0)
        )
        up = (y - low_y) / (high_y - low_y)
        return left + share * (width - left - right), height - bottom - up * (height - bottom - top - above)

    for y in _ticks(low_y, high_y):
        _, at = place(low_x, y)
        sheet.line(left, at, width - right, at, "grid")
        sheet.text(left - 6, at + 4, _number(100 * y) + " %" if chart.percent else _number(y), "soft", "end")
    for x in _log_ticks(low_x, high_x, 8 if width >= WIDE else 4) if chart.log_x else _ticks(low_x, high_x):
        at, foot = place(x, low_y)
        sheet.line(at, foot, at, foot + 5, "grid")
        sheet.text(at, foot + 18, _number(x), "soft", "middle")
    sheet.text(width - right, height - 4, chart.x_label, "soft", "end")
    if chart.level:
        _, at = place(low_x, chart.level[0])
        sheet.line(left, at, width - right, at, "level")
        sheet.text(left + 4, at - LEVEL_GAP, chart.level[1], "soft")
    for curve in chart.curves:
        sheet.path([place(x, y) for x, y in curve.points], curve.side)
        for x, y, _ in curve.marks:
            sheet.dot(*place(x, y), curve.side)
    if beside:
        _labels_beside(sheet, labels, [place(*curve.points[-1])[1] for curve in labels], width - right + 8)
    else:
        for row, curve in enumerate(labels):
            start = left if width >= WIDE else 4.0
            sheet.path([(start, 10 + LINE * row), (start + 26, 10 + LINE * row)], curve.side)
            sheet.text(start + 33, 14 + LINE * row, _label(curve), f"name {curve.side}")
    return str(sheet)


def _label(curve: Curve) -> str:
    marks = ", ".join(f"{name} {x:.0f}" for x, _, name in curve.marks)
    return f"{curve.label}: {marks} ms" if marks else curve.label


def _labels_beside(sheet: Sheet, curves: Sequence[Curve], heights: Sequence[float], x: float) -> None:
    """At the ends of the curves, one below the other where these are close."""
    before = -math.inf
    for height, curve in sorted(zip(heights, curves, strict=True), key=lambda pair: pair[0]):
        before = max(height + 4, before + LINE)
        sheet.text(x, before, curve.label, f"name {curve.side}")


def _bars(chart: Bars, width: int) -> str:
    left, row = 84.0, 30.0
    right = 64.0
    height = row * len(chart.bars) + (30 if chart.level else 8)
    sheet = Sheet(width, height, chart.title)
    most = max([value for _, value in chart.bars] + ([chart.level[0]] if chart.level else []) + [1e-9])
    scale = (width - left - right) / most
    top = 24.0 if chart.level else 0.0
    for place, (name, value) in enumerate(chart.bars):
        y = top + row * place
        sheet.text(left - 8, y + 19, name, "ink", "end")
        sheet.box(left, y + 5, max(scale * value, 1.0), row - 10, "bar tailcut")
        sheet.text(left + scale * value + 6, y + 19, f"{100 * value:.2f} %")
    if chart.level:
        x = left + scale * chart.level[0]
        sheet.line(x, 18, x, height - 4, "level")
        sheet.text(x + 4, 13, chart.level[1], "soft", "end" if x > width - 80 else "middle")
    return str(sheet)


def _matrix(chart: Matrix, width: int) -> str:
    size = len(chart.names)
    left, top = 116.0, 44.0
    if width < WIDE:
        left = 62.0
    cell_width = min(96.0, (width - left - 4) / size)
    cell_height = 38.0
    sheet = Sheet(width, top + cell_height * size + 6, chart.title)
    most = max([share for line in chart.shares for share in line if share is not None] + [1e-9])
    sheet.text(left, 14, chart.column_label, "soft")
    if width >= WIDE:
        sheet.text(0, top + 23, chart.row_label, "soft")
    else:
        sheet.text(0, top - 12, "from", "soft")
    for column, name in enumerate(chart.names):
        sheet.text(left + cell_width * (column + 0.5), top - 10, name, "ink", "middle")
        sheet.text(left - 10, top + cell_height * (column + 0.5) + 4, name, "ink", "end")
    for row, line in enumerate(chart.shares):
        for column, share in enumerate(line):
            x, y = left + cell_width * column, top + cell_height * row
            # Never so dark that the number is not read on it.
            sheet.box(
                x + 1, y + 1, cell_width - 2, cell_height - 2, "heat", 0.06 + 0.44 * (share or 0.0) / most
            )
            text = "–" if share is None else f"{100 * share:.2f} %"
            sheet.text(x + cell_width / 2, y + cell_height / 2 + 4, text, "ink", "middle")
    return str(sheet)


def _range_y(values: Sequence[float], chart: Lines) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if chart.from_zero:
        return 0.0, 1.0 if high > 0.5 else high * 1.15 or 1.0
    if chart.percent:  # whole tens
        return math.floor(10 * low) / 10, math.ceil(10 * high + 1e-9) / 10
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    for divisor in (1, 2, 5, 10):
        if (high - low) / (step / divisor) >= 4:
            step /= divisor
            break
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) <= most:
            break
    return within


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
