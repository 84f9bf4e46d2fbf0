"""Draws charts as PNG. Only this module of the demo imports matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailcut.tools.demo.charts import Bars, Chart, Lines, Matrix

COLOURS = {"gloo": "#0072b2", "fp16": "#b35000", "tailcut": "#00795a"}
STYLES = {"gloo": "--", "fp16": ":", "tailcut": "-"}


def write_all(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """Write NAME.png for each chart. Returns nothing where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return []
    written = []
    for chart in charts:
        figure: Any = Figure(figsize=(8, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if isinstance(chart, Lines):
            _lines(axes, chart)
        elif isinstance(chart, Bars):
            _bars(axes, chart)
        else:
            _matrix(axes, chart)
        axes.set_title(chart.title)
        path = directory / f"{chart.name}.png"
        figure.savefig(path, dpi=150)
        written.append(path)
    return written


def _lines(axes: Any, chart: Lines) -> None:
    for curve in chart.curves:
        xs, ys = zip(*curve.points, strict=True) if curve.points else ((), ())
        style = {"color": COLOURS[curve.side], "linestyle": STYLES[curve.side], "linewidth": 2.2}
        marks = ", ".join(f"{name} {x:.0f}" for x, _, name in curve.marks)
        label = f"{curve.label}: {marks} ms" if marks else curve.label
        axes.plot(xs, ys, label=label or None, **style)
        for x, y, _ in curve.marks:
            axes.plot([x], [y], "o", color=COLOURS[curve.side])
    if chart.level:
        axes.axhline(chart.level[0], color="grey", linestyle=(0, (1, 3)))
        axes.annotate(chart.level[1], (0.01, chart.level[0]), xycoords=("axes fraction", "data"), va="bottom")
    if chart.log_x:
        axes.set_xscale("log")
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if any(curve.label for curve in chart.curves):
        axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _bars(axes: Any, chart: Bars) -> None:
    names, values = zip(*reversed(chart.bars), strict=True)
    bars = axes.barh(names, [100 * value for value in values], color=COLOURS["tailcut"])
    axes.bar_label(bars, fmt="%.2f %%", padding=3)
    if chart.level:
        axes.axvline(100 * chart.level[0], color="grey", linestyle=(0, (1, 3)))
        axes.annotate(
            chart.level[1], (100 * chart.level[0], 0.98), xycoords=("data", "axes fraction"), ha="right"
        )
    axes.set_xlabel("%")


def _matrix(axes: Any, chart: Matrix) -> None:
    shares = [[0.0 if share is None else share for share in line] for line in chart.shares]
    axes.imshow(shares, cmap="Oranges", vmin=0.0, vmax=2 * max(map(max, shares)) or 1.0, aspect="auto")
    for row, line in enumerate(chart.shares):
        for column, share in enumerate(line):
            text = "–" if share is None else f"{100 * share:.2f} %"
            axes.text(column, row, text, ha="center", va="center")
    places = range(len(chart.names))
    axes.set(xlabel=chart.column_label, ylabel=chart.row_label)
    axes.set_xticks(places, chart.names)
    axes.set_yticks(places, chart.names)
