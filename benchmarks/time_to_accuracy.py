"""Time to accuracy of tailcut, of Gloo and of torch's hooks: sides x scenarios x seeds, one cell at a time.

    sudo python benchmarks/time_to_accuracy.py --scenarios clean,tail-3 --sides gloo,fp16,tailcut --seeds 3
    python benchmarks/time_to_accuracy.py --report docs/results.md --json cnn.json gpt.json

Every cell is a training of its own, on a network of its own: same weights, batches, trouble and warm-up for
all sides of a seed. A cell that the JSON file has is not run again, so an interrupted matrix goes on where it
was. Rank 0 evaluates between steps, as users do, and the others go on as far as they can.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_book import Book, Stored
from results_page import page
from results_picture import draw
from results_table import differences, summary, table

from tailcut import ConfigError, TailcutError
from tailcut.tools.bench import machine
from tailcut.tools.race import Cell, Course, figures_of, parse_sides, run_cell
from tailcut.tools.race.places import check_tcp, default_tcp
from tailcut.tools.race.sides import LOSSLESS
from tailcut.tools.testbed import HostScenario, load_scenario
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

ROOT = Path(__file__).resolve().parents[1]
DATA_BESIDE = ROOT.parent / "shared" / "data"
"""Where data may lie beside a checkout."""
SCENARIOS = (
    *("clean", "tail-1.5", "tail-3", "bursts", "neighbours", "lossy-1", "trim-50"),
    *("straggler", "dead-rank", "stuck-rank", "cross-dc", "jobs-4", "jobs-16"),
)
SIDES = "gloo,fp16,bf16,powersgd,tailcut,raw,optireduce,drive,eden4"
OVERHEAD_S = 20.0
"""A guess of what a cell takes besides its seconds, until one has been seen."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scenarios", default=",".join(SCENARIOS), help="names or files.toml, separated by commas")
    add(
        "--sides",
        default=SIDES,
        help=f"tailcut:FIELD=VALUE,... sets fields of its Config; {LOSSLESS} is Gloo over loopback "
        f"(default: {SIDES})",
    )
    add("--seeds", type=int, default=3, help="of weights, batches and trouble (default: 3)")
    add("--first-seed", type=int, default=0)
    add("--model", default="cnn", help="cnn, mlp, resnet, gpt or gpt-finetuned (default: cnn)")
    add("--data", help="its directory or text file; none: what is always there (default: $TAILCUT_DATA)")
    add("--checkpoint", type=Path, help="for gpt-finetuned")
    add("--seconds", type=float, default=90.0, help="of timed steps per cell (default: 90)")
    add("--steps", type=int, help="instead of --seconds; the learning rate falls to 0 over them")
    add("--eval-every", type=float, default=2.0, metavar="S", help="rank 0 evaluates (default: 2 s)")
    add("--target", type=float, help="the figure to reach (default: the model's own)")
    add("--until-target", action="store_true", help="end a cell when it has the target, not after --seconds")
    add("--hosts", type=int, help="instead of the scenario's number")
    add("--rate-mbit", type=float, help="of the ports, instead of the scenario's")
    add("--mtu", type=int, help="instead of the scenario's")
    add(
        "--tcp",
        default="",
        help="congestion controls on the hosts, such as cubic,bbr (default: the machine's)",
    )
    add("--loopback", action="store_true", help="no testbed: all ranks on 127.0.0.1")
    add("--json", type=Path, nargs="+", metavar="FILE", default=[Path("time_to_accuracy.json")])
    add("--again", action="store_true", help="run the cells that the file has as well")
    add("--report", type=Path, metavar="FILE.md", help="run nothing: make this page from the JSON files")
    add(
        "--picture",
        type=Path,
        metavar="FILE.svg",
        help="with --report: accuracy against time, first scenario",
    )
    return parser.parse_args()


def data_of(given: str | None) -> Path | None:
    """None takes what is always there."""
    if given == "none":
        return None
    named = given or os.environ.get("TAILCUT_DATA")
    if named:
        return Path(named).resolve()
    return DATA_BESIDE if DATA_BESIDE.is_dir() else None


def scenarios_of(options: argparse.Namespace) -> Iterator[HostScenario]:
    for name in options.scenarios.split(","):
        scenario = load_scenario(name, **given(hosts=options.hosts))
        port = replace(scenario.port, **given(rate_mbit_s=options.rate_mbit, mtu_bytes=options.mtu))
        yield replace(scenario, port=port)


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def cells_of(options: argparse.Namespace, course: Course) -> list[Cell]:
    """In the order in which they run. Each seed begins with another side."""
    sides = parse_sides(options.sides)
    tcps = [] if options.loopback else options.tcp.split(",") if options.tcp else []
    for tcp in tcps:
        check_tcp(tcp)
    return [
        Cell(side=side, scenario=scenario, seed=seed, tcp=tcp, course=course)
        for scenario in scenarios_of(options)
        for tcp in tcps or [default_tcp()]
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for turn in [seed % len(sides)]
        for side in sides[turn:] + sides[:turn]
    ]


def conditions_of(options: argparse.Namespace, course: Course, source: str) -> dict[str, Any]:
    """What all cells of a file have in common. Whoever asks for other conditions takes another file."""
    return {
        "model": course.workload,
        "source": source,
        "seconds": None if course.steps else course.seconds,
        "steps": course.steps,
        "stop_at": course.stop_at,
        "eval_every_s": course.eval_every_s,
        "loopback": course.loopback,
        **{name: getattr(options, name) for name in ("hosts", "rate_mbit", "mtu")},
    }


def measure(options: argparse.Namespace) -> None:
    course = Course(
        workload=options.model,
        data=data_of(options.data),
        checkpoint=options.checkpoint and options.checkpoint.resolve(),
        seconds=options.seconds,
        steps=options.steps,
        eval_every_s=options.eval_every,
        loopback=options.loopback,
    )
    facts = checked_facts(course)
    if options.until_target:
        course = replace(course, stop_at=facts.target if options.target is None else options.target)
    if len(options.json) != 1:
        raise ConfigError("--json takes one file, unless --report makes a page from several")
    cells = cells_of(options, course)
    if not options.loopback:
        become_root_of_a_namespace()
    book = Book.open(options.json[0], conditions_of(options, course, facts.source), machine.describe())
    wanted = [address(cell) for cell in cells]
    if options.again:
        book.forget(wanted)
    missing = [cell for cell in cells if address(cell) not in book]
    tell(f"{len(cells)} cells, {len(cells) - len(missing)} of them in {options.json[0]}\n")
    run(missing, book, options)
    shown = [stored for stored in book.cells if tuple(stored[name] for name in Book.ADDRESS) in wanted]
    print(table(shown, options.target))
    if options.steps:
        print(differences(LOSSLESS, shown))


def run(cells: list[Cell], book: Book, options: argparse.Namespace) -> None:
    start_s = time.monotonic()
    for done, cell in enumerate(cells):
        each_s = (time.monotonic() - start_s) / done if done else options.seconds + OVERHEAD_S
        left_s = each_s * (len(cells) - done)
        where = f"{cell.scenario.name}, seed {cell.seed}, {cell.tcp}"
        tell(f"[{done + 1}/{len(cells)}, {left_s / 60:.1f} min left] {where}: {cell.side.name}: ")
        with tempfile.TemporaryDirectory(prefix="tailcut-race-") as name:
            outcome = run_cell(cell, Path(name))
        stored = {
            **dict(zip(Book.ADDRESS, address(cell), strict=True)),
            "commit": commit(),
            "facts": outcome.facts,
            **figures_of(outcome),
        }
        book.add(stored)
        tell(f"{summary(stored, options.target)}\n")


def address(cell: Cell) -> tuple[Any, ...]:
    return cell.scenario.name, cell.tcp, cell.seed, cell.side.name


def checked_facts(course: Course) -> Any:
    """Those of the workload. Says now what would otherwise fail in the first cell."""
    from tailcut.pytorch.workloads import load

    facts = load(course.workload, course.data, course.checkpoint).facts()
    tell(f"{facts.name}: {facts.parameters / 1e6:.2f} M parameters, {facts.source}\n")
    return facts


def report(options: argparse.Namespace) -> None:
    books: list[Stored] = [Book.read(path) for path in options.json]
    options.report.write_text(page(books, options.target, [path.name for path in options.json]))
    if options.picture:
        draw(books[0]["cells"], options.scenarios.split(",")[0], options.picture)


def commit() -> str | None:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def tell(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)


def main() -> None:
    options = parse_options()
    try:
        (report if options.report else measure)(options)
    except (TailcutError, OSError) as error:
        raise SystemExit(f"time_to_accuracy: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
