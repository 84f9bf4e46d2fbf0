"""Makes the table of ddp_testbed.py from its cells, each of which is one side in one round. No processes, no
files."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from scipy.stats import t

from tailcut.tools.bench.figures import percentile

Cell = dict[str, Any]
BASELINE = "fp16"
HEAD = (
    *("side", "steps", "p50 ms", "p90 ms", "p99 ms", f"{BASELINE}/side p50", f"{BASELINE}/side p99"),
    *("% at equal time", "% at equal steps"),
)
NOTES = f"""\
Steps are per round; percentiles are over the steps of all ranks and rounds.
{BASELINE}/side: {BASELINE}'s percentile over the side's in the same round, median (min-max); above 1 the side
is faster. Accuracy, mean (min-max) over rounds: of the whole test set at the end, and of a part of it at
the last step that all sides of the round reached."""


def table(sides: Sequence[str], cells: Sequence[Cell]) -> str:
    done = [cell for cell in cells if not cell["failed"]]
    rows = [list(HEAD), *(_row(side, done) for side in sides)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{text:>{width}}" for text, width in columns)])
        for row in rows
        for columns in [zip(row[1:], widths[1:], strict=True)]
    ]
    failures = [
        f"{cell['side']}, round {cell['round'] + 1}: failed: {cell['failed']}"
        for cell in cells
        if cell["failed"]
    ]
    return "\n".join([*lines, *failures, NOTES])


def summary(cell: Cell) -> str:
    """One cell in a line."""
    if cell["failed"]:
        return f"failed: {cell['failed']}"
    p50_s, p99_s = (percentile(_times_s(cell), q) for q in (50, 99))
    first = cell["ranks"][0]
    text = f"{_steps(cell)} steps, p50 {1e3 * p50_s:.0f} ms, p99 {1e3 * p99_s:.0f} ms, "
    text += f"accuracy {first['accuracy']:.1%}"
    return f"{text}; {first['stats_text']}" if "stats_text" in first else text


def differences(base: str, cells: Sequence[Cell]) -> str:
    """How the final accuracy of each side differs from that of the base with the same seed, in points."""
    done = [cell for cell in cells if not cell["failed"]]
    based = {cell["round"]: cell for cell in done if cell["side"] == base}
    if not based:
        return ""
    lines = [f"final accuracy minus that of {base}, in points: mean and 95 % interval over paired seeds"]
    for side in dict.fromkeys(cell["side"] for cell in done if cell["side"] != base):
        own = [cell for cell in done if cell["side"] == side and cell["round"] in based]
        points = [100 * (_final(cell) - _final(based[cell["round"]])) for cell in own]
        if len(points) > 1:
            low, high = t.interval(0.95, len(points) - 1, fmean(points), stdev(points) / sqrt(len(points)))
            lines.append(
                f"{side}: {fmean(points):+.2f} ({low:+.2f} to {high:+.2f}), {len(points)} seeds; "
                f"replicas equal at the end of {sum(map(_replicas_equal, own))}"
            )
    return "\n".join(lines)


def _final(cell: Cell) -> float:
    return float(cell["ranks"][0]["accuracy"])


def _replicas_equal(cell: Cell) -> bool:
    return len({rank["parameters"] for rank in cell["ranks"].values()}) == 1


def _row(side: str, done: Sequence[Cell]) -> list[str]:
    own = [cell for cell in done if cell["side"] == side]
    if not own:
        return [side, "failed", *["-"] * (len(HEAD) - 2)]
    all_s = [time_s for cell in own for time_s in _times_s(cell)]
    ratios = [_ratios(own, done, q) for q in (50, 99)]
    final = [100 * _final(cell) for cell in own]
    alike = [100 * _accuracy_at(_reached(cell["round"], done), cell) for cell in own]
    return [
        side,
        f"{fmean(map(_steps, own)):.0f}",
        *(f"{1e3 * percentile(all_s, q):.0f}" for q in (50, 90, 99)),
        *(_spread(median(values), values, 2) if values else "-" for values in ratios),
        *(_spread(fmean(values), values, 1) for values in (final, alike)),
    ]


def _ratios(own: Sequence[Cell], done: Sequence[Cell], q: float) -> list[float]:
    base = {cell["round"]: percentile(_times_s(cell), q) for cell in done if cell["side"] == BASELINE}
    return [base[cell["round"]] / percentile(_times_s(cell), q) for cell in own if cell["round"] in base]


def _times_s(cell: Cell) -> list[float]:
    return [time_s for rank in cell["ranks"].values() for time_s in rank["times_s"]]


def _steps(cell: Cell) -> int:
    return len(cell["ranks"][0]["times_s"])


def _reached(number: int, done: Sequence[Cell]) -> int:
    """The last step that all sides of a round have reached."""
    return min(_steps(cell) for cell in done if cell["round"] == number)


def _accuracy_at(step: int, cell: Cell) -> float:
    """The accuracy at a step, from rank 0's evaluations before and after it."""
    at, _, accuracies = zip(*cell["ranks"][0]["evaluations"], strict=True)
    return float(np.interp(step, at, accuracies))


def _spread(middle: float, values: Sequence[float], digits: int) -> str:
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
