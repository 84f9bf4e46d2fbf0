"""Training races: the same model over Gloo, torch's hooks and tailcut, on a testbed or on loopback."""

from tailcut.tools.race.cell import Cell, Course, Outcome, run_cell
from tailcut.tools.race.figures import figure_at, figures_of, reached_s
from tailcut.tools.race.progress import ProgressReader, stream_of
from tailcut.tools.race.sides import OTHERS, PRESETS, Side, parse_side, parse_sides

__all__ = [
    "OTHERS",
    "PRESETS",
    "Cell",
    "Course",
    "Outcome",
    "ProgressReader",
    "Side",
    "figure_at",
    "figures_of",
    "parse_side",
    "parse_sides",
    "reached_s",
    "run_cell",
    "stream_of",
]
