"""The options of each benchmark of ``tailcut bench``, and where its output goes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.tools.bench import codec_table, machine, table
from tailcut.tools.bench.allreduce import DEFAULT_SIZES, Options, Row, run
from tailcut.tools.bench.codec import DEFAULT_SIZE_BYTES, CodecOptions, Step, run_codec
from tailcut.tools.bench.placement import OnLoopback, OnTestbed, Placement
from tailcut.tools.bench.sides import SIDES
from tailcut.tools.cli.sizes import size_bytes
from tailcut.tools.testbed import Testbed, character, load_scenario
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure, with results checked")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    _add_allreduce(benchmarks)
    _add_codec(benchmarks)


def _add_allreduce(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "allreduce",
        help="time per op over bucket sizes, on local workers or on a testbed",
        description="Averages buckets over worker processes and checks every result on every rank. Times are "
        "those of the slowest rank of each op, after a barrier. With --testbed each is on a host of its own.",
    )
    parser.set_defaults(run=_run_allreduce)
    add = parser.add_argument
    add("--ranks", type=_integers, metavar="N[,N...]", help="workers (default: 4, or a scenario's hosts)")
    add(
        "--sizes",
        type=_sizes,
        default=DEFAULT_SIZES,
        metavar="SIZE[,SIZE...]",
        help="bucket sizes in bytes; K, M and G are powers of 1024 (default: 1K to 100M)",
    )
    add("--iters", type=int, metavar="N", help="timed ops per round (default: 100, fewer for large buckets)")
    add("--warmup", type=int, default=3, metavar="N", help="ops before a size's first round (default: 3)")
    add("--rounds", type=int, default=7, metavar="N", help="rounds; each gives one ratio (default: 7)")
    add(
        "--against",
        choices=[name for name in SIDES if name != "tailcut"],
        help="measure this too, in the same processes, taking turns: Gloo, or a hook of torch's over it",
    )
    add("--testbed", metavar="SCENARIO", help="on the hosts of a scenario (see tailcut testbed)")
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")
    config = parser.add_argument_group("configuration of the group (see tailcut.Config)")
    config.add_argument("--deadline", type=float, metavar="SECONDS", help="hard end of an op")
    config.add_argument("--receive-buffer", type=size_bytes, metavar="SIZE", help="socket buffer to ask for")
    config.add_argument("--packet-bytes", type=size_bytes, metavar="SIZE", help="largest payload of a packet")
    config.add_argument("--codec", metavar="NAME", help="raw, planes or auto (raw, on one host)")
    config.add_argument(
        "--planes", type=int, metavar="N", help="bits a coordinate of planes (default: 0, from the budget)"
    )
    config.add_argument("--no-offload", action="store_true", help="no UDP segmentation offload")


def _run_allreduce(arguments: argparse.Namespace) -> None:
    scenario = load_scenario(arguments.testbed, **_hosts(arguments)) if arguments.testbed else None
    options = Options(
        ranks=(scenario.hosts,) if scenario else arguments.ranks or (4,),
        sizes_bytes=arguments.sizes,
        iters=arguments.iters,
        warmup=arguments.warmup,
        rounds=arguments.rounds,
        sides=("tailcut", arguments.against) if arguments.against else ("tailcut",),
        config=_config(arguments),
    )
    if arguments.json is not None:
        _check_writable(arguments.json)
    if scenario is None:
        _measure_allreduce(arguments, options, OnLoopback())
        return
    if scenario.stops_processes:
        raise ConfigError(
            f"{scenario.name} stops processes, and a benchmark of the ones it stops compares nothing: "
            f"tailcut testbed run {arguments.testbed} -- COMMAND does that to any script"
        )
    become_root_of_a_namespace()
    with Testbed.up(scenario) as testbed:
        print(f"# {testbed.summary()}", flush=True)
        for line in character.measure(testbed).lines():
            print(f"# {line}", flush=True)
        testbed.begin_faults()  # such as links that go down
        _measure_allreduce(arguments, options, OnTestbed(testbed))


def _hosts(arguments: argparse.Namespace) -> dict[str, int]:
    if arguments.ranks is None:
        return {}
    if len(arguments.ranks) != 1:
        raise ConfigError("a testbed has one number of hosts: give --ranks one")
    return {"hosts": arguments.ranks[0]}


def _measure_allreduce(arguments: argparse.Namespace, options: Options, placement: Placement) -> None:
    facts = machine.describe()
    copied = machine.memcpy_bytes_per_s(machine.cores())
    rows: list[Row] = []
    progress = table.TerminalProgress() if sys.stderr.isatty() else table.PlainProgress()
    print(f"# {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}")
    print(f"# memcpy on all cores: {copied / 1e9:.1f} GB/s")
    try:
        with closing(run(options, progress, placement)) as results:
            for row in results:
                progress.clear()
                if not rows or rows[-1].ranks != row.ranks:
                    print(_title(options, row.ranks, copied))
                    print(table.header(options))
                print("\n".join([table.line(row), *table.details(row)]), flush=True)
                rows.append(row)
    finally:
        progress.clear()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(table.as_json(options, facts, copied, rows), indent=1) + "\n")


def _add_codec(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "codec",
        help="time per coordinate of the codec, as multiples of memcpy",
        description="Rotates, encodes and decodes one vector of normal random numbers on one core. Each step "
        "is timed next to a memcpy of the same vector; the best of all rounds counts. NMSE is that of the "
        "unbiased result.",
    )
    parser.set_defaults(run=_run_codec)
    add = parser.add_argument
    add("--size", type=size_bytes, default=DEFAULT_SIZE_BYTES, metavar="SIZE", help="bytes (default: 105M)")
    add("--rounds", type=int, default=9, metavar="N", help="times that everything is measured (default: 9)")
    add(
        "--packet-bytes", type=size_bytes, default=1472, metavar="SIZE", help="largest packet (default: 1472)"
    )
    add(
        "--trim-bytes",
        type=size_bytes,
        default=256,
        metavar="SIZE",
        help="shortest frame that a switch leaves",
    )
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")


def _run_codec(arguments: argparse.Namespace) -> None:
    options = CodecOptions(
        size_bytes=arguments.size,
        rounds=arguments.rounds,
        packet_bytes=arguments.packet_bytes,
        trim_bytes=arguments.trim_bytes,
    )
    if arguments.json is not None:
        _check_writable(arguments.json)
    facts = machine.describe()
    print(f"# {facts['cpu']}, one core, {options.count} coordinates, best of {options.rounds}")
    print(codec_table.header())
    steps: list[Step] = []
    for step in run_codec(options):
        print(codec_table.line(step), flush=True)
        steps.append(step)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(codec_table.as_json(options, facts, steps), indent=1) + "\n")


def _title(options: Options, ranks: int, copied_bytes_per_s: float) -> str:
    ceiling = machine.busbw_ceiling(ranks, copied_bytes_per_s)
    return f"# {ranks} ranks, {options.rounds} rounds; busbw if they only copied: {ceiling / 1e9:.2f} GB/s"


def _config(arguments: argparse.Namespace) -> Config:
    given = {
        "deadline_s": arguments.deadline,
        "receive_buffer_bytes": arguments.receive_buffer,
        "packet_bytes": arguments.packet_bytes,
        "codec": arguments.codec,
        "planes": arguments.planes,
        "offload": False if arguments.no_offload else None,
    }
    return Config(**{name: value for name, value in given.items() if value is not None})


def _check_writable(path: Path) -> None:
    """Raise ConfigError before the measurement, not after it."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(size_bytes(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 2,4,8") from None
