"""DDP training on a testbed's scenario: step times and accuracy of tailcut, of Gloo and of torch's hooks.

    sudo python benchmarks/ddp_testbed.py --scenario bursts --sides tailcut,tailcut:planes=4,fp16,powersgd

Every side trains the same CNN (ddp_training.py) for the same time on the same hosts, one side after the
other. The next round has another seed and another order. A step's time is each rank's own, from its batch to
the end of its optimizer; percentiles are over all ranks' steps. Rank 0 evaluates between steps, as users do.
Its own step times do not include that; those of the others do as far as they wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from ddp_table import Cell, differences, summary, table

from tailcut import Config, ConfigError, TailcutError
from tailcut.config import flag
from tailcut.tools.bench import machine
from tailcut.tools.testbed import HostScenario, Testbed, load_scenario, system
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("ddp_training.py")
OTHERS = ("gloo", "fp16", "bf16", "powersgd")
LOSSLESS = "lossless"
"""Gloo over loopback: what the network does to it would only change its time."""
FIRST_PORT = 29500
"""Every cell has its own port, so that it does not matter what the cell before left there."""
OVERHEAD_S = 20.0
"""A guess of what a cell takes besides its seconds, until one has been seen."""
LIMIT_S = 90.0
"""A cell counts as hanging after twice its seconds and this time."""
STEP_LIMIT_S = 2.0
"""With --steps, a cell counts as hanging when its steps take this long on average."""
GRACE_S = 5.0
"""After a rank has failed, the others have this long to end."""
LOOK_S = 0.02
REASON_CHARACTERS = 200
CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Side:
    name: str
    kind: str
    config: dict[str, Any]
    """Fields of Config; only for tailcut."""


def parse_sides(text: str) -> list[Side]:
    """``tailcut:planes=4,dscp=10,fp16``: an entry with a ``=`` and without a name belongs to the side before
    it."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--sides has {', '.join(sorted(repeated))} more than once")
    return [parse_side(name) for name in names]


def parse_side(name: str) -> Side:
    kind, _, settings = name.partition(":")
    if kind not in ("tailcut", *OTHERS, LOSSLESS):
        raise ConfigError(f"there is no side {kind!r}; there are tailcut, {', '.join((*OTHERS, LOSSLESS))}")
    if settings and kind != "tailcut":
        raise ConfigError(f"{name}: only tailcut takes settings")
    defaults = vars(Config())
    config: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        if field not in defaults:
            raise ConfigError(f"{name}: Config has no {field!r}; it has {', '.join(defaults)}")
        of_type = type(defaults[field])
        try:
            config[field] = flag(value) if of_type is bool else of_type(value)
        except ValueError:
            raise ConfigError(f"{name}: {field}={value!r} is not of type {of_type.__name__}") from None
    Config(**config)
    return Side(name, kind, config)


class Loopback:
    """The part of a testbed that a cell needs, with all ranks side by side on 127.0.0.1."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.killed: set[int] = set()

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> Process:
        ours = {"RANK": str(rank), "WORLD_SIZE": str(self._ranks), "GLOO_SOCKET_IFNAME": "lo"}
        both = {**os.environ, **ours, **env, "MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(
            argv, env=both, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )

    def _nothing(self) -> None:
        """There is no trouble to begin or end."""

    begin_faults = end_faults = begin_background = end_background = _nothing


Place = Testbed | Loopback


def run_cell(place: Place, ranks: int, order: dict[str, Any], port: int) -> Cell:
    """What the ranks of one side have measured, or why they have not."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        order_file = directory / "order.json"
        order_file.write_text(json.dumps(order))
        argv = [sys.executable, str(WORKER), str(order_file)]
        env = {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        processes: list[Process] = []
        try:
            for rank in range(ranks):
                with log_of(rank, directory).open("wb") as log:
                    output = {"stdout": log.fileno(), "stderr": subprocess.STDOUT}
                    processes.append(place.spawn(rank, argv, env, **output))
            failed = wait_for(processes, place, directory, order["limit_s"])
        finally:
            place.end_faults()
            place.end_background()
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        survivors = [] if failed else [rank for rank in range(ranks) if rank not in place.killed]
        results = {rank: json.loads((directory / f"{rank}.json").read_text()) for rank in survivors}
        return {"failed": failed, "ranks": results}


def wait_for(processes: list[Process], place: Place, directory: Path, limit_s: float) -> str | None:
    """Waits until all have ended, and says what went wrong. The scenario's trouble begins with the timed
    steps."""
    until_s = time.monotonic() + limit_s
    begun = False
    failed: str | None = None
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until_s:
            return failed or f"not done after {limit_s:.0f} s"
        if not begun and (directory / "begun").exists():
            begun = True
            place.begin_faults()
            place.begin_background()
        if failed is None and (failed := failure(processes, place, directory)):
            until_s = time.monotonic() + GRACE_S
        time.sleep(LOOK_S)
    return failed or failure(processes, place, directory)


def failure(processes: list[Process], place: Place, directory: Path) -> str | None:
    for rank, process in enumerate(processes):
        if process.poll() and rank not in place.killed:
            said = log_of(rank, directory).read_text(errors="replace").splitlines()
            reason = next((line for line in reversed(said) if "Error" in line), "it gives no reason")
            return f"rank {rank} ended with {process.returncode}: {reason[:REASON_CHARACTERS]}"
    return None


def log_of(rank: int, directory: Path) -> Path:
    return directory / f"{rank}.log"


# ---- the command ------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scenario", default="clean", help="name or file.toml (default: clean)")
    add("--loopback", action="store_true", help="no testbed: all ranks on 127.0.0.1")
    add("--hosts", type=int, help="one rank on each (default: the scenario's number; 4 on loopback)")
    add("--rate-mbit", type=float, help="of the ports, instead of the scenario's")
    add("--mtu", type=int, help="instead of the scenario's")
    add("--tcp", help="congestion control on the hosts, such as cubic (default: the machine's)")
    add(
        "--sides",
        default=",".join(("tailcut", *OTHERS)),
        help="in this order at first; tailcut:FIELD=VALUE,... sets fields of its Config (default: all)",
    )
    add("--rounds", type=int, default=3, help="each has a seed of its own (default: 3)")
    add("--seconds", type=float, default=30.0, help="of timed steps per side and round (default: 30)")
    add(
        "--steps",
        type=int,
        help="timed steps per side and round, instead of --seconds; the learning rate falls to 0 over them",
    )
    add("--batch", type=int, default=32, help="images per rank and step (default: 32)")
    add("--eval-every", type=int, default=25, metavar="STEPS", help="rank 0 evaluates (default: 25)")
    add("--data", help="directory with Fashion-MNIST's four .gz files, or digits (default: $TAILCUT_DATA)")
    add("--json", type=Path, metavar="FILE", help="where all that was measured goes")
    return parser.parse_args()


def data_directory(given: str | None) -> str | None:
    """The directory of MNIST; None: scikit-learn's digits are used."""
    if given == "digits":
        return None
    beside = ROOT.parent / "shared" / "data" / "fashion-mnist"
    directory = Path(given or os.environ.get("TAILCUT_DATA") or beside)
    if (directory / "train-images-idx3-ubyte.gz").exists():
        return str(directory.resolve())
    if given:
        raise ConfigError(f"{given} has no train-images-idx3-ubyte.gz; --data digits takes scikit-learn's")
    tell(f"there is no Fashion-MNIST in {directory} (--data): scikit-learn's digits instead\n")
    return None


def scenario_of(options: argparse.Namespace) -> HostScenario:
    scenario = load_scenario(options.scenario, **given(hosts=options.hosts))
    if any(kill.host == 0 for kill in scenario.kills):
        raise ConfigError(f"{scenario.name} kills host 0, which says when all stop: kill another")
    port = replace(scenario.port, **given(rate_mbit_s=options.rate_mbit, mtu_bytes=options.mtu))
    return replace(scenario, port=port)


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def place_of(options: argparse.Namespace) -> Iterator[tuple[Place, int, str]]:
    """Where the cells run, how many ranks there are, and a description of it."""
    if options.loopback:
        if options.tcp or options.rate_mbit or options.mtu:
            raise ConfigError("--tcp, --rate-mbit and --mtu are for a testbed: leave out --loopback")
        ranks = options.hosts or 4
        tcp = Path(CONGESTION_CONTROL).read_text().strip()
        yield Loopback(ranks), ranks, f"{ranks} ranks on loopback; TCP: {tcp}"
        return
    if options.tcp and options.tcp not in (known := CONGESTION_CONTROLS.read_text().split()):
        raise ConfigError(f"--tcp {options.tcp}: this kernel has {', '.join(known)} (modprobe tcp_...)")
    scenario = scenario_of(options)
    become_root_of_a_namespace()
    with Testbed.up(scenario) as testbed:
        inside = ("netns", "exec", testbed.hosts[0].namespace)
        tcp = options.tcp or system.run("ip", *inside, "cat", CONGESTION_CONTROL).strip()
        for host in testbed.hosts if options.tcp else ():
            # Set by route: in a namespace, the sysctl allows only what the machine allows to everybody.
            network = ip_interface(f"{host.address}/24").network
            route = ("route", "change", str(network), "dev", "eth0", "congctl", options.tcp)
            system.run("ip", "-n", host.namespace, *route)
        yield testbed, len(testbed.hosts), f"{testbed.summary()}; TCP: {tcp}"


def measure(options: argparse.Namespace) -> None:
    sides = parse_sides(options.sides)
    data = data_directory(options.data)
    turns = [
        (number, side)
        for number in range(options.rounds)
        for places in [number % len(sides)]
        for side in sides[places:] + sides[:places]
    ]
    cells: list[Cell] = []
    if options.json:
        options.json.touch()  # otherwise a mistake in its name would show only after the first cell
    with place_of(options) as (place, ranks, what):
        tell(f"{what}; batch {options.batch} per rank; {data or 'digits'}\n")
        start_s = time.monotonic()
        for number, side in turns:
            each_s = (time.monotonic() - start_s) / len(cells) if cells else options.seconds + OVERHEAD_S
            left_s = each_s * (len(turns) - len(cells))
            tell(f"[{len(cells) + 1}/{len(turns)}, {left_s / 60:.1f} min left] {side.name}: ")
            order = {
                "kind": side.kind,
                "config": side.config,
                "data": data,
                "seed": number,
                "batch": options.batch,
                "seconds": options.seconds,
                "steps": options.steps,
                "limit_s": LIMIT_S + (STEP_LIMIT_S * options.steps if options.steps else 2 * options.seconds),
                "eval_every": options.eval_every,
            }
            where = Loopback(ranks) if side.kind == LOSSLESS else place
            port = free_port() if isinstance(where, Loopback) else FIRST_PORT + len(cells)
            result = run_cell(where, ranks, order, port)
            cells.append({"side": side.name, "round": number, "seed": number, **result})
            tell(f"{summary(cells[-1])}\n")
            if options.json:
                write_json(options, what, data, cells)
    print(what)
    print(table([side.name for side in sides], cells))
    if options.steps:
        print(differences(LOSSLESS, cells))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write_json(options: argparse.Namespace, what: str, data: str | None, cells: list[Cell]) -> None:
    """Called after every cell, so that an interruption does not lose what has been measured."""
    document = {
        "what": what,
        "commit": commit(),
        "machine": machine.describe(),
        "options": {**vars(options), "json": str(options.json), "data": data or "digits"},
        "cells": cells,
    }
    options.json.write_text(json.dumps(document))


def commit() -> str | None:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def tell(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)


def main() -> None:
    try:
        measure(parse_options())
    except (TailcutError, OSError) as error:
        raise SystemExit(f"ddp_testbed: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
