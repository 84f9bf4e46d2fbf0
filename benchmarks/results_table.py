"""Rows of time_to_accuracy.py's tables, for a terminal and for the page of results."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from results_figures import PLAIN, POWERSGD, Cell, best_plain, of_side, ratio, spread, target_of, time_s
from scipy.stats import t

from tailcut.tools.race.sides import ALONE

HEAD = (
    *("side", "steps", "p50 ms", "p99 ms", "p99/p50", "s to target"),
    *("best plain/side", "powersgd/side", "at the end"),
)
NOTES = f"""\
Median over seeds, and (least–most). p50 and p99 are over the steps of all ranks. Best plain: of
{", ".join(PLAIN)}, the one with the least median time to the target in the scenario; best plain/side is its
time to the target over the side's with the same seed, so above 1 the side is sooner. ≥: the other did not
get there in its time. It stopped: the other died or hung before. At the end: the figure of the whole test
set after the last step. {ALONE}: nothing is exchanged, so its steps are the floor of the others'."""


def table(cells: Sequence[Cell], target: float | None) -> str:
    """All scenarios, for a terminal."""
    parts = []
    for scenario, tcp in dict.fromkeys((cell["scenario"], cell["tcp"]) for cell in cells):
        own = [cell for cell in cells if (cell["scenario"], cell["tcp"]) == (scenario, tcp)]
        rows = [list(HEAD), *rows_of(own, target)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        parts.append(f"{scenario}, TCP {tcp}; target {target_of(own, target)}")
        parts += [
            "  ".join(
                [f"{row[0]:<{widths[0]}}"]
                + [f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ]
        parts += failures(own)
        parts.append("")
    return "\n".join([*parts, NOTES])


def rows_of(cells: Sequence[Cell], target: float | None) -> list[list[str]]:
    """One row for each side of one scenario."""
    goal = target_of(cells, target)
    return [_row(side, cells, goal) for side in dict.fromkeys(cell["side"] for cell in cells)]


def failures(cells: Sequence[Cell]) -> list[str]:
    return [
        f"{cell['side']}, seed {cell['seed']}: stopped after {cell['lasted_s']:.0f} s: {cell['failed']}"
        for cell in cells
        if cell["failed"]
    ]


def summary(cell: Cell, target: float | None) -> str:
    """One cell in a line."""
    goal = target_of([cell], target)
    parts = [f"failed: {cell['failed']}"] if cell["failed"] else []
    parts.append(f"{cell['steps']} steps")
    if "p50_s" in cell:
        parts.append(f"p50 {1e3 * cell['p50_s']:.0f} ms, p99 {1e3 * cell['p99_s']:.0f} ms")
    if goal is not None:
        parts.append(f"{goal:g} after {time_s(cell, goal):.1f} s")
    if "figure" in cell:
        parts.append(f"{cell['facts']['figure']} {cell['figure']:.3f}")
    return ", ".join(parts) + (f"; {cell['stats_text']}" if "stats_text" in cell else "")


def differences(base: str, cells: Sequence[Cell]) -> str:
    """How the final figure of each side differs from that of the base with the same seed."""
    lines = []
    for scenario in dict.fromkeys(cell["scenario"] for cell in cells):
        done = [cell for cell in cells if cell["scenario"] == scenario and not cell["failed"]]
        based = {cell["seed"]: cell["figure"] for cell in of_side(done, base)}
        for side in dict.fromkeys(cell["side"] for cell in done if cell["side"] != base):
            own = [cell for cell in of_side(done, side) if cell["seed"] in based]
            points = [cell["figure"] - based[cell["seed"]] for cell in own]
            if len(points) > 1:
                error = stdev(points) / sqrt(len(points))
                low, high = (
                    t.interval(0.95, len(points) - 1, fmean(points), error) if error else [fmean(points)] * 2
                )
                equal = sum(cell.get("replicas_equal", False) for cell in own)
                lines.append(
                    f"{scenario}, {side}: {fmean(points):+.4f} ({low:+.4f} to {high:+.4f}), {len(points)} "
                    f"seeds; replicas equal at the end of {equal}"
                )
    head = f"final figure minus that of {base}: mean and 95 % interval over paired seeds"
    return "\n".join([head, *lines]) if lines else ""


def _row(side: str, cells: Sequence[Cell], target: float | None) -> list[str]:
    own = of_side(cells, side)
    stopped = sum(bool(cell["failed"]) for cell in own)
    name = f"{side} (stopped in {stopped} of {len(own)})" if stopped else side
    texts = [
        spread(own, lambda cell: float(cell["steps"])),
        spread(own, lambda cell: 1e3 * cell["p50_s"] if "p50_s" in cell else None),
        spread(own, lambda cell: 1e3 * cell["p99_s"] if "p99_s" in cell else None),
    ]
    tail = spread(own, lambda cell: cell["p99_s"] / cell["p50_s"] if "p50_s" in cell else None)
    final = spread(own, lambda cell: cell.get("figure"))
    row = [name, *(value.text(0) if value else "–" for value in texts), tail.text(2) if tail else "–"]
    if target is None or side == ALONE:  # who trains alone has smaller batches: another training
        return [*row, "–", "–", "–", "–"]
    sooner = spread(own, lambda cell: time_s(cell, target))
    plain = best_plain(cells, target)
    ratios = [ratio(cells, side, other, target) if side != other else None for other in (plain, POWERSGD)]
    return [
        *row,
        sooner.text(1) if sooner else "–",
        *(value.text() if value else "–" for value in ratios),
        final.text(3) if final else "–",
    ]
