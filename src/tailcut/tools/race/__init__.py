"""Training races: the same model over Gloo, torch's hooks and tailcut, on a testbed or on loopback."""

from tailcut.tools.race.cell import Cell, Course, Outcome, outcome_of, run_cell
from tailcut.tools.race.figures import figure_at, figures_of, reached_s, smoothed
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
    "outcome_of",
    "parse_side",
    "parse_sides",
    "reached_s",
    "run_cell",
    "smoothed",
    "stream_of",
]
