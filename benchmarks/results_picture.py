"""Draws the figure of merit against time for all sides of one scenario: the picture of the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailcut.errors import ConfigError
from tailcut.tools.race import smoothed

Cell = dict[str, Any]
COLOURS = {
    "tailcut": "#0072b2",
    "powersgd": "#cc79a7",
    "fp16": "#e69f00",
    "bf16": "#009e73",
    "gloo": "#555555",
}
"""That colour-blind people can tell apart. Other sides are drawn in black."""


def draw(cells: Sequence[Cell], scenario: str, path: Path) -> None:
    """One curve for each seed of a side, through means of three evaluations."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from None
    own = [cell for cell in cells if cell["scenario"] == scenario and cell["evaluations"]]
    if not own:
        raise ConfigError(f"--picture: no cell of {scenario!r} has an evaluation")
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for side in dict.fromkeys(cell["side"] for cell in own):
        curves = [smoothed(cell["evaluations"]) for cell in own if cell["side"] == side]
        curves = [curve for curve in curves if curve]
        colour = COLOURS.get(side, "black")
        for k, curve in enumerate(curves):
            label = side if k == 0 else None  # one entry in the legend
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.6, alpha=0.8, label=label)
    figure_name = own[0]["facts"]["figure"]
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(figure_name)
    axes.set_title(f"{scenario}: {own[0]['facts']['name']}, {own[0]['facts']['source']}", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
