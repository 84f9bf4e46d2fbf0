"""``tailcut demo``: the same training over Gloo, Gloo with the fp16 hook and tailcut, and a report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from tailcut.errors import ConfigError
from tailcut.tools.demo import png
from tailcut.tools.demo.charts import charts_of
from tailcut.tools.demo.display import display_on
from tailcut.tools.demo.options import Options, data_of
from tailcut.tools.demo.page import Circumstances, page
from tailcut.tools.demo.results import NAMES, SIDES, Results, Run
from tailcut.tools.demo.stage import Stage, choose
from tailcut.tools.demo.verdict import verdict
from tailcut.tools.demo.watch import Watch
from tailcut.tools.race import Cell, Course, parse_side, run_cell

__all__ = ["Options", "data_of", "run"]

EVALUATIONS = 30
"""About how many a run has. More would take much of the time: each stops worker 0 for up to 0.2 s."""
LEAST_BETWEEN_S = 0.2
OVERHEAD_S = 26.0
"""About what a run takes besides its seconds on two cores: start, warm-up, evaluation on the whole."""


def run(options: Options, machine: Mapping[str, str | int], stream: TextIO | None = None) -> Results:
    """Run all sides, show them live, write the report, and print the verdict. Leaves no process behind."""
    stream = stream or sys.stdout
    if find_spec("torch") is None:
        raise ConfigError("the demo trains with torch, which is not installed: pip install 'tailcut[demo]'")
    options.prepare_output()
    stage = choose(options)
    course = Course(
        workload=options.model,
        data=options.data,
        seconds=options.seconds,
        eval_every_s=max(options.seconds / EVALUATIONS, LEAST_BETWEEN_S),
        loopback=stage.loopback,
    )
    head = introduction(options, stage, _source_of(course))
    print("\n".join(head), end="\n\n", file=stream, flush=True)
    results = _run_all(options, stage, course, Watch(display_on(stream), options.seconds))
    text = verdict(results)
    charts = charts_of(results)
    about = Circumstances(
        text,
        stage.words,
        stage.scenario.description,
        warning_of(stage),
        options.command(stage.scenario.name),
        machine,
    )
    report = options.output / "report.html"
    report.write_text(page(results, charts, about))
    pictures = png.write_all(charts, options.output)
    beside = f", and {len(pictures)} PNGs beside it" if pictures else "; PNGs need matplotlib (tailcut[plot])"
    print(f"\nreport: {report}{beside}\n{text}", file=stream, flush=True)
    return results


def introduction(options: Options, stage: Stage, source: str) -> list[str]:
    names = ", ".join(NAMES[side] for side in SIDES)
    minutes = len(SIDES) * options.seeds * (options.seconds + OVERHEAD_S) / 60
    warning = warning_of(stage)
    return [
        f"{stage.words}: {stage.scenario.description}",
        *([f"NOTE: {warning}"] if warning else []),
        f"{options.model} on {source}; {options.seconds:g} s each: {names}. About {minutes:.1f} minutes.",
    ]


def warning_of(stage: Stage) -> str | None:
    if not stage.loopback:
        return None
    why = f"No testbed could be built here ({stage.instead_of}). " if stage.instead_of else ""
    return (
        f"{why}This is loopback, which has no slow links and no other traffic: only processes are stopped, "
        "as stragglers are. It says little about networks."
    )


def _source_of(course: Course) -> str:
    """What the model learns from. Says now what would otherwise fail in the first run."""
    from tailcut.pytorch.workloads import load

    return load(course.workload, course.data).source


def _run_all(options: Options, stage: Stage, course: Course, watch: Watch) -> Results:
    runs = []
    for seed in range(options.seeds):
        turn = seed % len(SIDES)  # each seed begins with another side
        for side in SIDES[turn:] + SIDES[:turn]:
            directory = _emptied(options.output / "runs" / f"{side}-{seed}")
            cell = Cell(side=parse_side(side), scenario=stage.scenario, seed=seed, course=course)
            watch.begin(side, seed, directory)
            outcome = run_cell(cell, directory, watch.look)
            watch.end(outcome.failed)
            runs.append(Run(side, seed, outcome))
    return Results(runs, options.seconds)


def _emptied(directory: Path) -> Path:
    """The directory of a run, without what an earlier demo has left there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
