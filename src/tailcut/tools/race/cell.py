"""One cell of a race: one side, one scenario, one seed, in processes of its own.

cell = Cell(side=parse_side("fp16"), scenario=load_scenario("tail-3"), course=Course(seconds=60))
outcome = run_cell(cell, directory, look=display.refresh)  # it reads directory/0.jsonl, 1.jsonl, ...
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tailcut.errors import ConfigError
from tailcut.tools.race.places import Place, Process, place_of
from tailcut.tools.race.progress import BEGUN, Line, ProgressReader, stream_of
from tailcut.tools.race.sides import Side
from tailcut.tools.testbed import HostScenario

WORKER = "tailcut.tools.race.worker"
LIMIT_S = 90.0
"""A cell counts as hanging after twice its seconds and this time."""
STEP_LIMIT_S = 2.0
"""With a number of steps, a cell counts as hanging when they take this long on average."""
GRACE_S = 5.0
"""After a rank has failed, the others have this long to end."""
LOOK_S = 0.02
REASON_CHARACTERS = 200
_PLACES = re.compile(r"\[[^\]]*\]:? ?")
"""Where in torch's sources something was raised, and by which rank; the rest says what."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the cells of a comparison have in common."""

    workload: str = "cnn"
    data: Path | None = None
    """Where the workload's data is; None takes what is always there."""
    checkpoint: Path | None = None
    seconds: float = 30.0
    """How long the timed steps last ..."""
    steps: int | None = None
    """... unless there is a number of them. The learning rate then falls to 0 over them."""
    stop_at: float | None = None
    """The figure at which training ends before its time; None trains on."""
    eval_every_s: float = 2.0
    """Rank 0 evaluates between two steps when so much time has passed: all sides spend the same share of
    their time on it."""
    loopback: bool = False
    """Whether all ranks run on 127.0.0.1 instead of a testbed."""

    @property
    def limit_s(self) -> float:
        return LIMIT_S + (STEP_LIMIT_S * self.steps if self.steps else 2 * self.seconds)


@dataclass(frozen=True, kw_only=True)
class Cell:
    side: Side
    scenario: HostScenario
    seed: int = 0
    tcp: str | None = None
    """The congestion control of TCP on the hosts; None is the machine's."""
    course: Course = Course()

    def __post_init__(self) -> None:
        if any(kill.host == 0 for kill in self.scenario.kills):
            raise ConfigError(f"{self.scenario.name} kills host 0, which says when all stop: kill another")


@dataclass(frozen=True)
class Outcome:
    """What the ranks have told and measured, or why they have not."""

    failed: str | None
    """What went wrong: a rank that died, or that did not end."""
    steps: dict[int, list[Line]]
    """By rank, without those that the scenario killed: its timed steps, also if the cell failed later."""
    evaluations: list[Line]
    facts: dict[str, Any]
    """Those of the workload; empty if it did not get so far."""
    results: dict[int, dict[str, Any]]
    """By rank: its figures at the end; empty if the cell failed."""


def run_cell(cell: Cell, directory: Path, look: Callable[[], None] = lambda: None) -> Outcome:
    """Run the cell. ``look`` is called again and again meanwhile; what ranks say is in ``directory``."""
    scenario = replace(cell.scenario, seed=cell.seed)
    loopback = cell.course.loopback or cell.side.on_loopback
    order = directory / "order.json"
    order.write_text(json.dumps(_order(cell)))
    with place_of(scenario, loopback=loopback, tcp=None if loopback else cell.tcp) as place:
        failed = _run(place, order, scenario.hosts, cell.course.limit_s, look)
        survivors = [rank for rank in range(scenario.hosts) if rank not in place.killed]
    return outcome_of(directory, survivors, failed)


def outcome_of(directory: Path, survivors: list[int], failed: str | None = None) -> Outcome:
    """What the ranks have left in the directory of their cell."""
    lines = {rank: ProgressReader(stream_of(rank, directory)).look() for rank in survivors}
    results = {}
    if not failed:
        results = {rank: json.loads((directory / f"{rank}.json").read_text()) for rank in survivors}
    steps = {rank: [line for line in said if "step_s" in line] for rank, said in lines.items()}
    last = steps[0][-1]["step"] if steps[0] else 0
    return Outcome(
        failed,
        # A rank that ran ahead of rank 0 may have heard too late that it was the last step.
        {rank: [line for line in of_rank if line["step"] <= last] for rank, of_rank in steps.items()},
        [line for line in lines[0] if "figure" in line],
        next((line["facts"] for line in lines[0] if "facts" in line), {}),
        results,
    )


def _order(cell: Cell) -> dict[str, Any]:
    course = asdict(cell.course)
    files = {name: str(course[name]) if course[name] else None for name in ("data", "checkpoint")}
    return {
        **course,
        **files,
        "kind": cell.side.kind,
        "config": dict(cell.side.config),
        "measured_deadline": cell.side.measured_deadline,
        "seed": cell.seed,
        "all_live": not cell.scenario.kills,
    }


def _run(place: Place, order: Path, ranks: int, limit_s: float, look: Callable[[], None]) -> str | None:
    directory = order.parent
    argv = [sys.executable, "-m", WORKER, str(order)]
    env = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    processes: list[Process] = []
    try:
        for rank in range(ranks):
            with _log_of(rank, directory).open("wb") as log:
                output = {"stdout": log.fileno(), "stderr": subprocess.STDOUT}
                processes.append(place.spawn(rank, argv, env, **output))
        return _wait(processes, place, directory, limit_s, look)
    finally:
        place.end()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(
    processes: list[Process], place: Place, directory: Path, limit_s: float, look: Callable[[], None]
) -> str | None:
    """Waits until all have ended, and says what went wrong. The scenario's trouble begins with the timed
    steps."""
    until_s = time.monotonic() + limit_s
    begun = False
    failed: str | None = None
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until_s:
            return failed or f"not done after {limit_s:.0f} s"
        if not begun and (directory / BEGUN).exists():
            begun = True
            place.begin()
        if failed is None and (failed := _failure(processes, place, directory)):
            until_s = time.monotonic() + GRACE_S
        look()
        time.sleep(LOOK_S)
    return failed or _failure(processes, place, directory)


def _failure(processes: list[Process], place: Place, directory: Path) -> str | None:
    for rank, process in enumerate(processes):
        if process.poll() and rank not in place.killed:
            said = _log_of(rank, directory).read_text(errors="replace").splitlines()
            line = next((line for line in reversed(said) if "Error" in line), "it gives no reason")
            reason = _PLACES.sub("", line)[:REASON_CHARACTERS]
            return f"rank {rank} ended with {process.returncode}: {reason}"
    return None


def _log_of(rank: int, directory: Path) -> Path:
    return directory / f"{rank}.log"
