"""Two curves of what cutting costs: the tail of ops' times, and the tail of packets.

    sudo python benchmarks/curves.py cut     # accuracy and speed-up against the share of the tail that is cut
    sudo python benchmarks/curves.py trim    # accuracy against the share of packets that a switch trims

Both train the workload cnn for equal steps, the learning rate falling to 0, with fixed planes. **cut**: on
tail-3, without adaptive bounds. A first cell waits for everything; the deadline of the others is the quantile
of its ops' times above which so large a share lies. What is late is carried on one line, discarded on the
other. **trim**: every port trims that share of the packets at random to 256 bytes. The JSON file keeps cells
that have run: they are not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from results_book import Book, Stored
from time_to_accuracy import ROOT, commit, data_of, tell

from tailcut import TailcutError
from tailcut.tools.bench import machine
from tailcut.tools.race import Cell, Course, Side, figures_of, run_cell
from tailcut.tools.sim import plot
from tailcut.tools.testbed import load_scenario
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

CUT_PLANES = 4
LATE = ("carry", "discard")
WAIT_ALL_S = 60.0
TRIM_PLANES = (16, 4)
TRIM_BYTES = 256


class Runner:
    """Runs cells, or takes them from the book."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._course = Course(data=data_of(options.data), steps=options.steps)
        conditions = {"curve": options.curve, "steps": options.steps}
        self._book = Book.open(options.json, conditions, machine.describe())

    def cell(self, name: str, scenario: Any, config: dict[str, Any], seed: int) -> Stored:
        place = (scenario.name, None, seed, name)
        if place not in self._book:
            tell(f"{scenario.name}, {name}, seed {seed}: ")
            cell = Cell(side=Side(name, "tailcut", config), scenario=scenario, seed=seed, course=self._course)
            with tempfile.TemporaryDirectory(prefix="tailcut-curve-") as directory:
                outcome = run_cell(cell, Path(directory))
            steps = [line for lines in outcome.steps.values() for line in lines]
            ops_s = sorted(op_s for line in steps for op_s in line.get("ops_s", ()))
            address = dict(zip(Book.ADDRESS, place, strict=True))
            times = {"ops_s": ops_s} if not outcome.failed else {}
            stored = {**address, "commit": commit(), "facts": outcome.facts, **figures_of(outcome), **times}
            self._book.add(stored)
            tell(f"{stored['failed'] or stored['figure']}\n")
        return next(
            stored for stored in self._book.cells if tuple(stored[part] for part in Book.ADDRESS) == place
        )


def cut(options: argparse.Namespace, runner: Runner) -> None:
    scenario = load_scenario("tail-3")
    fixed = {"codec": "planes", "planes": CUT_PLANES, "adaptive": False}
    points: dict[str, list[tuple[float, float, float]]] = {late: [] for late in LATE}
    waited = []
    for seed in range(options.seeds):
        base = runner.cell("wait for all", scenario, {**fixed, "deadline_s": WAIT_ALL_S}, seed)
        waited.append(base)
        for share in options.shares:
            deadline_s = float(np.quantile(base["ops_s"], 1 - share))
            for late in LATE:
                config = {**fixed, "deadline_s": deadline_s, "late": late}
                stored = runner.cell(f"{late}, {share:g} cut", scenario, config, seed)
                if not stored["failed"]:
                    points[late].append((share, base["lasted_s"] / stored["lasted_s"], stored["figure"]))
    draw_cut(points, fmean(stored["figure"] for stored in waited), options.plot)
    for late, values in points.items():
        for share in options.shares:
            own = [value for value in values if value[0] == share]
            if own:
                sooner, figure = (fmean(value[i] for value in own) for i in (1, 2))
                print(f"{late:<8} {share:>6.1%} cut: {sooner:.2f} x as fast, accuracy {figure:.1%}")


def draw_cut(points: dict[str, list[tuple[float, float, float]]], waited: float, path: Path) -> None:
    figure, axes = plot.new_axes()
    faster = axes.twinx()
    for late, values in points.items():
        shares = sorted({value[0] for value in values})
        means = [[fmean(v[i] for v in values if v[0] == share) for share in shares] for i in (1, 2)]
        (line,) = axes.plot(
            [100 * s for s in shares], [100 * m for m in means[1]], "o-", label=f"accuracy, {late}"
        )
        faster.plot(
            [100 * s for s in shares], means[0], "s:", color=line.get_color(), label=f"speed-up, {late}"
        )
    axes.axhline(100 * waited, color="0.5", label="accuracy, all awaited")
    axes.set(
        xscale="log", xlabel="share of the tail that is cut (%)", ylabel="accuracy after equal steps (%)"
    )
    faster.set(ylabel="speed-up over waiting for all")
    lines = [*axes.get_lines(), *faster.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], fontsize="small", loc="best")
    axes.grid(True, which="both", alpha=0.3)
    plot.save(figure, path)


def trim(options: argparse.Namespace, runner: Runner) -> None:
    clean = load_scenario("clean")
    points: dict[int, dict[float, list[float]]] = {planes: {} for planes in TRIM_PLANES}
    for seed in range(options.seeds):
        for share in options.shares:
            switch = replace(clean.switch, trim_frac=share)
            scenario = replace(clean, name=f"trim {share:g}", switch=switch)
            for planes in TRIM_PLANES:
                config = {"codec": "planes", "planes": planes, "trim_bytes": TRIM_BYTES}
                stored = runner.cell(f"{planes} planes", scenario, config, seed)
                if not stored["failed"]:
                    points[planes].setdefault(share, []).append(stored["figure"])
    figure, axes = plot.new_axes()
    for planes, by_share in points.items():
        means = {share: fmean(values) for share, values in by_share.items()}
        axes.plot([100 * s for s in means], [100 * m for m in means.values()], "o-", label=f"{planes} planes")
        for share, mean in means.items():
            print(f"{planes:>2} planes, {share:>4.0%} trimmed: accuracy {mean:.1%}")
    axes.set(xlabel="share of packets trimmed (%)", ylabel="accuracy after equal steps (%)")
    axes.legend(fontsize="small")
    axes.grid(True, alpha=0.3)
    plot.save(figure, options.plot)


CURVES = {"cut": cut, "trim": trim}
SHARES = {"cut": (0.001, 0.003, 0.01, 0.03, 0.1), "trim": (0.0, 0.2, 0.4, 0.6, 0.8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("curve", choices=CURVES)
    add("--steps", type=int, default=300, help="of each cell (default: 300)")
    add("--seeds", type=int, default=3)
    add("--shares", help="separated by commas (default: 0.001 to 0.1, or 0 to 0.8)")
    add("--data", help="directory of Fashion-MNIST; none: digits (default: $TAILCUT_DATA)")
    add("--json", type=Path, metavar="FILE", help="where cells are kept (default: CURVE.json)")
    add("--plot", type=Path, metavar="FILE", help="(default: docs/CURVE.svg)")
    options = parser.parse_args()
    shares = options.shares.split(",") if options.shares else SHARES[options.curve]
    options.shares = tuple(map(float, shares))
    options.json = options.json or Path(f"{options.curve}.json")
    options.plot = options.plot or ROOT / "docs" / f"{options.curve}.svg"
    try:
        plot.check(options.plot)
        become_root_of_a_namespace()
        CURVES[options.curve](options, Runner(options))
    except (TailcutError, OSError) as error:
        raise SystemExit(f"curves: {error}") from None
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
