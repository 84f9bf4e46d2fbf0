"""What the report draws, as data: lines, bars and matrices, made from results. Knows neither SVG nor PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailcut.tools.demo.results import NAMES, TAILCUT, Results, Run
from tailcut.tools.demo.verdict import figure_text

CDF_POINTS = 200
SOURCES = ("quantized", "trimmed", "lost", "late")
"""Those of ε that count against the budget."""


@dataclass(frozen=True)
class Curve:
    side: str
    label: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, float, str]] = ()
    """Points with a word beside them."""


@dataclass(frozen=True)
class Lines:
    name: str
    title: str
    note: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    percent: bool = False
    """Whether y is a share."""
    from_zero: bool = True
    """Whether y begins with 0."""
    log_x: bool = False
    level: tuple[float, str] | None = None
    """A line across: where, and what it is."""


@dataclass(frozen=True)
class Bars:
    name: str
    title: str
    note: str
    bars: Sequence[tuple[str, float]]
    """Shares by name."""
    level: tuple[float, str] | None = None


@dataclass(frozen=True)
class Matrix:
    name: str
    title: str
    note: str
    row_label: str
    column_label: str
    names: Sequence[str]
    shares: Sequence[Sequence[float | None]]
    """By row and column; None where nothing was to come."""


Chart = Lines | Bars | Matrix


def charts_of(results: Results) -> list[Chart]:
    """All that the results have something for."""
    charts: list[Chart] = [figure_chart(results), step_chart(results)]
    for run in results.of(TAILCUT)[:1]:
        if run.outcome.results:
            charts += [*link_charts(run), budget_chart(run)]
        if any("spent" in line for line in run.outcome.evaluations):
            charts.append(spending_chart(run))
    return charts


def figure_chart(results: Results) -> Lines:
    figure = str(results.facts.get("figure", "accuracy"))
    curves = []
    for run in results.runs:
        points = [(line["at_s"], line["figure"]) for line in run.outcome.evaluations]
        curves.append(Curve(run.side, NAMES[run.side] if run.seed == 0 else "", points))
    goal = results.goal()
    return Lines(
        "accuracy",
        f"{figure.capitalize()} against time",
        "On images or text that the model has not learned from. Same weights, batches and trouble for all "
        "sides. A time to accuracy is that of the mean of three evaluations in a row.",
        "seconds of training",
        figure,
        curves,
        percent=figure == "accuracy",
        from_zero=False,
        level=None if goal is None else (goal, figure_text(goal, results.facts)),
    )


def step_chart(results: Results) -> Lines:
    curves = []
    for run in results.runs:
        times_ms = [1e3 * time_s for time_s in run.step_times_s]
        if not times_ms:
            continue
        shares = np.linspace(0, 1, CDF_POINTS)
        quantiles = np.quantile(times_ms, shares, method="inverted_cdf")
        marks = [
            (float(np.quantile(times_ms, share, method="inverted_cdf")), share, name)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
            if run.seed == 0
        ]
        points = list(zip(map(float, quantiles), map(float, shares), strict=True))
        curves.append(Curve(run.side, NAMES[run.side] if run.seed == 0 else "", points, marks))
    return Lines(
        "step-times",
        "How long steps took",
        "The share of steps, of all workers, that took at most so long. Dots are p50 and p99.",
        "milliseconds for a step",
        "share of steps",
        curves,
        percent=True,
        log_x=True,
    )


def link_charts(run: Run) -> list[Matrix]:
    """What was late or cut on its way, by sender and receiver."""
    results = run.outcome.results
    ranks = sorted({int(source) for result in results.values() for source in result["links"]} | set(results))

    def shares(kind: str) -> list[list[float | None]]:
        return [[_share(results.get(to, {}), source, kind) for to in ranks] for source in ranks]

    words = (
        "The share of the coordinates that were late, lost or cut off when the receiver went on. Worker 0 "
        "evaluates between its steps, which can make it late."
    )
    names = [str(rank) for rank in ranks]
    return [
        Matrix(
            "late-contributions",
            "Gradients late or cut, by link",
            f"{words} Gradients go from every worker to the owner of their shard.",
            *("from worker", "to worker", names, shares("contributions")),
        ),
        Matrix(
            "late-means",
            "Means late or cut, by link",
            f"{words} Means go from their owner to every worker.",
            *("from worker", "to worker", names, shares("means")),
        ),
    ]


def _share(result: dict[str, dict[str, dict[str, int]]], source: int, kind: str) -> float | None:
    counts = result.get("links", {}).get(str(source), {})
    return counts[f"late_{kind}"] / counts[kind] if counts.get(kind) else None


def budget_chart(run: Run) -> Bars:
    stats = run.outcome.results[0]["stats"]
    epsilon, budget = stats["epsilon"], stats["budget"]
    return Bars(
        "budget",
        "What the budget was spent on",
        "The error energy that tailcut has added to the mean gradients, over their energy, by its source. "
        f"Together {100 * sum(epsilon[source] for source in SOURCES):.2f} %.",
        [(source, epsilon[source]) for source in SOURCES],
        (budget, f"budget {100 * budget:.3g} %") if budget else None,
    )


def spending_chart(run: Run) -> Lines:
    spent = [(line["at_s"], line["spent"]) for line in run.outcome.evaluations if "spent" in line]
    budget = next((line["budget"] for line in run.outcome.evaluations if line.get("budget")), None)
    return Lines(
        "spending",
        "Budget spent over time",
        "The mean over all ops so far.",
        "seconds of training",
        "error added",
        [Curve(TAILCUT, NAMES[TAILCUT], spent)],
        percent=True,
        level=(budget, f"budget {100 * budget:.3g} %") if budget else None,
    )
