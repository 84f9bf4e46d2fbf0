"""What time_to_accuracy.py says about its cells: times to the target, ratios, spreads. No files, no text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tailcut.tools.race import reached_s

Cell = dict[str, Any]
PLAIN = ("gloo", "fp16", "bf16")
"""What anybody has with one line; the best of them in a scenario is what tailcut is compared with."""
POWERSGD, TAILCUT = "powersgd", "tailcut"


@dataclass(frozen=True)
class Spread:
    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None

    def text(self, digits: int, unit: str = "") -> str:
        if self.low == self.high:
            return _number(self.middle, digits, unit)
        ends = f"{_number(self.low, digits)}–{_number(self.high, digits)}"
        return f"{_number(self.middle, digits, unit)} ({ends})"


def _number(value: float, digits: int, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if math.isfinite(value) else "never"


def target_of(cells: Sequence[Cell], target: float | None) -> float | None:
    """The figure that the race is about."""
    if target is not None:
        return target
    return next((cell["facts"]["target"] for cell in cells if cell["facts"]), None)


def time_s(cell: Cell, target: float) -> float:
    """When the cell reached the target; infinite if it did not."""
    better = cell["facts"].get("higher_is_better", True)
    reached = reached_s(cell["evaluations"], target, better)
    return math.inf if reached is None else reached


def of_side(cells: Sequence[Cell], side: str) -> list[Cell]:
    return [cell for cell in cells if cell["side"] == side]


def best_plain(cells: Sequence[Cell], target: float) -> str | None:
    """Which of the plain sides has the least median time to the target, or, if none gets there, the shortest
    steps. Cells are of one scenario."""

    def rank(side: str) -> tuple[float, float]:
        own = of_side(cells, side)
        return median(time_s(cell, target) for cell in own), median(
            cell.get("p50_s", math.inf) for cell in own
        )

    there = [side for side in PLAIN if of_side(cells, side)]
    return min(there, key=rank, default=None)


@dataclass(frozen=True)
class Ratio:
    """How much sooner a side reached the target than another, paired by seed."""

    spread: Spread
    at_least: bool
    """Whether the other did not get there in some pair: then its cell's length counts instead."""
    stopped: bool
    """Whether the other died or hung before it got there, in every pair."""

    def text(self) -> str:
        if self.stopped:
            return "it stopped"
        return ("≥ " if self.at_least else "") + self.spread.text(2, " ×")


def ratio(cells: Sequence[Cell], side: str, other: str | None, target: float) -> Ratio | None:
    """None if the side did not reach the target with every seed, or there are no pairs."""
    others = {cell["seed"]: cell for cell in of_side(cells, other)} if other else {}
    pairs = [(cell, others[cell["seed"]]) for cell in of_side(cells, side) if cell["seed"] in others]
    values, at_least, stopped = [], False, True
    for own, its in pairs:
        own_s, its_s = time_s(own, target), time_s(its, target)
        if not math.isfinite(own_s):
            return None
        at_least |= not math.isfinite(its_s)
        stopped &= not math.isfinite(its_s) and bool(its["failed"])
        longest_s = max(its["lasted_s"], own["lasted_s"])
        values.append((its_s if math.isfinite(its_s) else longest_s) / own_s)
    spread = Spread.of(values)
    return Ratio(spread, at_least, stopped) if spread else None


def spread(cells: Sequence[Cell], figure: Callable[[Cell], float | None]) -> Spread | None:
    values = [value for value in map(figure, cells) if value is not None]
    return Spread.of(values)
