"""Figures of an outcome that results and reports are made of. No processes, no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tailcut.tools.race.cell import Outcome

Evaluation = Sequence[float]
"""Step, seconds, figure."""
QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "max_s": 1.0}
SMOOTHED = 3
"""A figure counts as the mean of so many evaluations, the one in the middle giving the time: one alone may
be lucky."""


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """A cell as it is stored: small, and enough for every table."""
    times_s = [line["step_s"] for steps in outcome.steps.values() for line in steps]
    first = outcome.steps.get(0, [])
    stored: dict[str, Any] = {
        "failed": outcome.failed,
        "steps": first[-1]["step"] if first else 0,
        "lasted_s": first[-1]["at_s"] if first else 0.0,
        "evaluations": [(line["step"], line["at_s"], line["figure"]) for line in outcome.evaluations],
    }
    if times_s:
        stored |= {name: _quantile(times_s, share) for name, share in QUANTILES.items()}
    if results := outcome.results:
        stored["figure"] = results[0]["figure"]
        if "parameters" in results[0]:
            stored["replicas_equal"] = len({result["parameters"] for result in results.values()}) == 1
        stored |= {name: results[0][name] for name in ("stats_text",) if name in results[0]}
        if "stats" in results[0]:
            stored["epsilon"] = results[0]["stats"]["epsilon"]
    return stored


def reached_s(evaluations: Sequence[Evaluation], target: float, higher_is_better: bool) -> float | None:
    """When the figure reached the target, by a line between evaluations; None if it did not."""
    sign = 1 if higher_is_better else -1
    smooth = smoothed(evaluations)
    before: tuple[float, float] | None = None
    for at_s, figure in smooth:
        if sign * figure >= sign * target:
            if before is None or figure == before[1]:
                return at_s
            return before[0] + (at_s - before[0]) * (target - before[1]) / (figure - before[1])
        before = at_s, figure
    return None


def figure_at(at_s: float, evaluations: Sequence[Evaluation]) -> float | None:
    """The figure at a time; before the first evaluation and without any it is unknown."""
    smooth = smoothed(evaluations)
    if not smooth or at_s < smooth[0][0]:
        return None
    times_s, figures = zip(*smooth, strict=True)
    return float(np.interp(at_s, times_s, figures))


def smoothed(evaluations: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """The middle of each run of evaluations: its time and the mean figure."""
    runs = [evaluations[i : i + SMOOTHED] for i in range(len(evaluations) - SMOOTHED + 1)]
    return [(run[SMOOTHED // 2][1], sum(entry[2] for entry in run) / SMOOTHED) for run in runs]


def _quantile(values: Sequence[float], share: float) -> float:
    return round(float(np.quantile(values, share, method="inverted_cdf")), 5)
