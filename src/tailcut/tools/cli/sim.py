"""The options of ``tailcut sim``, and where its output goes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tailcut.errors import ConfigError
from tailcut.simulation.baseline import ALGORITHMS
from tailcut.tools.bench.table import PlainProgress, TerminalProgress
from tailcut.tools.cli.sizes import size_bytes
from tailcut.tools.sim import plot, table
from tailcut.tools.sim.options import Options
from tailcut.tools.sim.run import Row, run
from tailcut.tools.testbed import load_scenario, shipped_names

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "sim",
        help="the scenarios of the testbed in virtual time, to thousands of ranks",
        description="Runs the real protocol core on a simulated network, back to back ops on every rank, and "
        "beside it other collectives over a reliable transport. Same seed, same result. Times are those "
        "of every op at every rank, from its entry to its end.",
        epilog=f"scenarios: {', '.join(shipped_names())}",
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("scenario", metavar="SCENARIO", help="its name (see: tailcut testbed scenarios) or a file.toml")
    add("--ranks", type=_integers, default=(), metavar="N[,N...]", help="instead of the scenario's hosts")
    add("--rows", type=int, default=0, metavar="N", help="of a grid; 1: flat (default: as a Group chooses)")
    add(
        "--size",
        type=size_bytes,
        default=25 << 20,
        metavar="SIZE",
        help="of a bucket, in bytes (default: 25M)",
    )
    add("--ops", type=int, default=200, metavar="N", help="one after the other (default: 200)")
    add("--warmup", type=int, metavar="N", help="first ops, not counted (default: a tenth, at most 20)")
    add("--codec", choices=["raw", "planes"], default="raw", help="of tailcut (default: raw)")
    add("--planes", type=int, default=16, metavar="N", help="bits a coordinate of planes (default: 16)")
    add("--mtu", type=int, metavar="BYTES", help="instead of the scenario's")
    add("--rate", type=float, metavar="GBIT/S", help="of every link, instead of the scenario's")
    add(
        "--compute", type=float, default=0.0, metavar="SECONDS", help="between two ops of a rank (default: 0)"
    )
    add(
        "--cores",
        type=int,
        default=0,
        metavar="N",
        help="predict the testbed on a machine of N cores, instead of hosts and links of their own",
    )
    add("--keyed", action="store_true", help="one bucket with a key, as with attach: what is late is carried")
    add(
        "--against",
        type=_names,
        default=(),
        metavar="NAME[,NAME...]",
        help=f"in the same network: {', '.join(ALGORITHMS)}",
    )
    add(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="hard end of an op (default: 4 times the least possible)",
    )
    add("--fixed", action="store_true", help="bounds are shares of the deadline, instead of adapting")
    add("--seed", type=int, metavar="N", help="instead of the scenario's")
    add("--values", action="store_true", help="real buckets, for an NMSE that is measured; small runs only")
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the distribution of times (.svg, .png; needs matplotlib)",
    )


def _run(arguments: argparse.Namespace) -> None:
    options = Options(
        scenario=load_scenario(arguments.scenario),
        ranks=arguments.ranks,
        size_bytes=arguments.size,
        ops=arguments.ops,
        warmup=arguments.warmup,
        rows=arguments.rows,
        codec=arguments.codec,
        planes=arguments.planes,
        mtu_bytes=arguments.mtu,
        rate_bytes_per_s=None if arguments.rate is None else arguments.rate * 1e9 / 8,
        against=arguments.against,
        seed=arguments.seed,
        deadline_s=arguments.deadline,
        adaptive=not arguments.fixed,
        values=arguments.values,
        compute_s=arguments.compute,
        cores=arguments.cores,
        keyed=arguments.keyed,
    )
    if arguments.plot is not None:
        plot.check(arguments.plot)
    for path in (arguments.json, arguments.plot):
        if path is not None:
            _check_writable(path)
    rows: list[Row] = []
    progress = TerminalProgress() if sys.stderr.isatty() else PlainProgress()
    try:
        with closing(run(options, progress)) as results:
            for row in results:
                progress.clear()
                print(table.title(options, row))
                if not rows:
                    print(table.header())
                print("\n".join(table.lines(row)), flush=True)
                rows.append(row)
    finally:
        progress.clear()
    if not options.values:
        print(table.FOOTNOTE)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(table.as_json(options, rows), indent=1) + "\n")
    if arguments.plot is not None:
        plot.draw_cdf(arguments.plot, options, rows)


def _check_writable(path: Path) -> None:
    """Raise ConfigError before the simulation, not after it."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 8,64,512"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
