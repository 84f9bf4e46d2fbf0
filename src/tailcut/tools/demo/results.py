"""The sides of a demo as they were measured, and what they are compared by. No processes, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tailcut.tools.race import Outcome, figures_of, reached_s, smoothed

SIDES = ("gloo", "fp16", "tailcut")
TAILCUT = "tailcut"
NAMES = {"gloo": "Gloo", "fp16": "Gloo with fp16", "tailcut": "tailcut"}
"""As people read them."""


@dataclass(frozen=True)
class Run:
    """One side with one seed."""

    side: str
    seed: int
    outcome: Outcome

    @property
    def figures(self) -> dict[str, Any]:
        return figures_of(self.outcome)

    @property
    def step_times_s(self) -> list[float]:
        return sorted(line["step_s"] for steps in self.outcome.steps.values() for line in steps)


@dataclass(frozen=True)
class Results:
    """All runs of a demo."""

    runs: Sequence[Run]
    seconds: float

    @property
    def facts(self) -> dict[str, Any]:
        """Those of the workload; empty if no run got so far."""
        return next((run.outcome.facts for run in self.runs if run.outcome.facts), {})

    @property
    def higher_is_better(self) -> bool:
        return bool(self.facts.get("higher_is_better", True))

    @property
    def sides(self) -> list[str]:
        return [side for side in SIDES if any(run.side == side for run in self.runs)]

    def of(self, side: str) -> list[Run]:
        return [run for run in self.runs if run.side == side]

    def failures(self, side: str) -> list[str]:
        return [run.outcome.failed for run in self.of(side) if run.outcome.failed]

    def best(self, side: str) -> float | None:
        """The best figure that every seed of the side had, as ``reached_s`` counts; None if one had none."""
        of_seeds = [[figure for _, figure in smoothed(run.figures["evaluations"])] for run in self.of(side)]
        if not of_seeds or not all(of_seeds):
            return None
        if self.higher_is_better:
            return min(map(max, of_seeds))
        return max(map(min, of_seeds))

    def goal(self) -> float | None:
        """The figure whose time is compared: the workload's target, if a side got there with every seed;
        else the best that tailcut and a rival both reached. None if there is no such figure."""
        better = max if self.higher_is_better else min
        worse = min if self.higher_is_better else max
        bests = {side: best for side in self.sides if (best := self.best(side)) is not None}
        if not bests:
            return None
        target = self.facts["target"]
        if any(better(best, target) == best for best in bests.values()):
            return float(target)
        rivals = [best for side, best in bests.items() if side != TAILCUT]
        if TAILCUT not in bests or not rivals:
            return float(better(bests.values()))
        return float(worse(bests[TAILCUT], better(rivals)))

    def reached_s(self, side: str, goal: float) -> float | None:
        """The median over seeds; None if that is never."""
        times_s = [
            reached_s(run.figures["evaluations"], goal, self.higher_is_better) for run in self.of(side)
        ]
        middle_s = median(math.inf if time_s is None else time_s for time_s in times_s)
        return middle_s if math.isfinite(middle_s) else None

    def quantile_s(self, side: str, name: str) -> float | None:
        """The median over seeds of a quantile of step times, such as p50_s."""
        values = [run.figures[name] for run in self.of(side) if name in run.figures]
        return median(values) if values else None
