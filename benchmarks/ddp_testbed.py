"""DDP training on a testbed's scenario: steps per second and accuracy of tailcut, Gloo and torch's hooks.

    sudo python benchmarks/ddp_testbed.py --scenario bursts --sides tailcut,tailcut:planes=4,fp16,powersgd

Every side trains the same CNN (ddp_training.py) for the same time on the same hosts, one side after the
other; the next round has another seed and another order. A step's time is each rank's own, from its batch to
the end of its optimizer: percentiles are over all ranks' steps. Rank 0 evaluates between steps, as users do;
that is in no step of its own, and in those of the others as far as they wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np

from tailcut import Config, ConfigError, TailcutError
from tailcut.bench import machine
from tailcut.bench.figures import percentile
from tailcut.config import flag
from tailcut.testbed import Scenario, Testbed, load_scenario, system
from tailcut.testbed.privilege import become_root_of_a_namespace

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("ddp_training.py")
HOOKS = ("gloo", "fp16", "bf16", "powersgd")
BASELINE = "fp16"
FIRST_PORT = 29500
OVERHEAD_S = 25.0
"""A guess at what a cell takes besides its seconds, until one has been seen."""
LIMIT_S = 90.0
"""On top of twice its seconds, what a cell may take before it counts as hanging."""
GRACE_S = 5.0
"""From the end of a rank that failed to the end of the others."""
CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


@dataclasses.dataclass(frozen=True)
class Side:
    name: str
    kind: str
    config: dict[str, Any]
    """Fields of Config, for tailcut."""


def parse_sides(text: str) -> list[Side]:
    """``tailcut:planes=4,codec=planes,fp16``: what has a ``=`` and no name belongs to the side before it."""
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
    if kind not in ("tailcut", *HOOKS):
        raise ConfigError(f"there is no side {kind!r}; there are tailcut, {', '.join(HOOKS)}")
    if settings and kind != "tailcut":
        raise ConfigError(f"{name}: only tailcut takes settings")
    config: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        config[field] = _converted(name, field, value)
    Config(**config)
    return Side(name, kind, config)


def _converted(name: str, field: str, text: str) -> Any:
    defaults = vars(Config())
    if field not in defaults:
        raise ConfigError(f"{name}: Config has no {field!r}; it has {', '.join(defaults)}")
    kind = type(defaults[field])
    try:
        return flag(text) if kind is bool else kind(text)
    except ValueError:
        raise ConfigError(f"{name}: {field}={text!r} is not of type {kind.__name__}") from None


class Place(Protocol):
    """Where the ranks of a cell run."""

    @property
    def killed(self) -> set[int]:
        """Ranks that died on purpose."""

    def start(self, rank: int, argv: list[str], port: int, output: Path) -> subprocess.Popen[bytes]: ...

    def begin_faults(self) -> None: ...

    def end_faults(self) -> None: ...


class OnTestbed:
    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self.begin_faults = testbed.begin_faults
        self.end_faults = testbed.end_faults

    @property
    def killed(self) -> set[int]:
        return self._testbed.killed

    def start(self, rank: int, argv: list[str], port: int, output: Path) -> subprocess.Popen[bytes]:
        env = {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            return self._testbed.spawn(rank, argv, env, stdout=file.fileno(), stderr=subprocess.STDOUT)


class OnLoopback:
    """All ranks beside each other, on 127.0.0.1."""

    killed: set[int] = set()  # noqa: RUF012

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def start(self, rank: int, argv: list[str], port: int, output: Path) -> subprocess.Popen[bytes]:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        with output.open("wb") as file:
            return subprocess.Popen(
                argv,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def begin_faults(self) -> None:
        pass

    def end_faults(self) -> None:
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---- one side, one round ----------------------------------------------------------------------------------


def run_cell(place: Place, ranks: int, order: dict[str, Any], port: int) -> dict[str, Any]:
    """The ranks' results, or why there are none."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        order_file = directory / "order.json"
        order_file.write_text(json.dumps(order))
        argv = [sys.executable, str(WORKER), str(order_file)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(place.start(rank, argv, port, directory / f"{rank}.log"))
            failed = _wait(place, processes, directory, LIMIT_S + 2 * order["seconds"])
        finally:
            place.end_faults()
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if failed:
            return {"failed": failed}
        return {
            "failed": None,
            "ranks": {
                rank: json.loads((directory / f"{rank}.json").read_text())
                for rank in range(ranks)
                if rank not in place.killed
            },
        }


def _wait(
    place: Place, processes: list[subprocess.Popen[bytes]], directory: Path, limit_s: float
) -> str | None:
    """Until all have ended; what went wrong. Faults begin with the timed steps."""
    end_s = time.monotonic() + limit_s
    begun = False
    failed: str | None = None
    while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
        if not begun and (directory / "begun").exists():
            begun = True
            place.begin_faults()
        if failed is None and (failed := _first_failure(place, processes, directory)):
            end_s = min(end_s, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    failed = failed or _first_failure(place, processes, directory)
    if failed is None and any(process.poll() is None for process in processes):
        return f"hangs: not done after {limit_s:.0f} s"
    return failed


def _first_failure(place: Place, processes: list[subprocess.Popen[bytes]], directory: Path) -> str | None:
    for rank, process in enumerate(processes):
        if process.poll() and rank not in place.killed:
            said = (directory / f"{rank}.log").read_text(errors="replace").split("\n")
            words = next((line.strip() for line in reversed(said) if "Error" in line), "no reason given")
            return f"rank {rank} ended with {process.returncode}: {words}"
    return None


# ---- the table --------------------------------------------------------------------------------------------


def pooled_s(cell: dict[str, Any]) -> list[float]:
    return [time_s for rank in cell["ranks"].values() for time_s in rank["times_s"]]


def steps(cell: dict[str, Any]) -> int:
    return len(cell["ranks"][0]["times_s"])


def at_equal_steps(cells: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """By round and side: accuracy at the last step that all sides of the round reached."""
    found: dict[int, dict[str, float]] = {}
    for number in {cell["round"] for cell in cells}:
        beside = [cell for cell in cells if cell["round"] == number]
        reached = min(map(steps, beside))
        found[number] = {}
        for cell in beside:
            at, _, accuracies = zip(*cell["ranks"][0]["evaluations"], strict=True)
            found[number][cell["side"]] = float(np.interp(reached, at, accuracies))
    return found


def spread(values: list[float], shape: str, middle: float) -> str:
    if not values:
        return "-"
    return f"{middle:{shape}} ({min(values):{shape}}-{max(values):{shape}})"


def table(sides: list[str], cells: list[dict[str, Any]]) -> str:
    done = [cell for cell in cells if not cell["failed"]]
    equal = at_equal_steps(done)
    base = {cell["round"]: pooled_s(cell) for cell in done if cell["side"] == BASELINE}
    head = ["side", "steps", "p50 ms", "p90 ms", "p99 ms"]
    head += [f"{BASELINE}/side p50", f"{BASELINE}/side p99", "% at equal time", "% at equal steps"]
    rows = [head]
    failures = []
    for side in sides:
        failures += [
            f"{side}, round {cell['round'] + 1}: failed: {cell['failed']}"
            for cell in cells
            if cell["side"] == side and cell["failed"]
        ]
        own = [cell for cell in done if cell["side"] == side]
        if not own:
            rows.append([side, "failed", *["-"] * (len(head) - 2)])
            continue
        all_s = [time_s for cell in own for time_s in pooled_s(cell)]
        row = [side, f"{fmean(map(steps, own)):.0f}"]
        row += [f"{1e3 * percentile(all_s, q):.0f}" for q in (50, 90, 99)]
        for q in (50, 99):
            ratios = [
                percentile(base[cell["round"]], q) / percentile(pooled_s(cell), q)
                for cell in own
                if cell["round"] in base
            ]
            row.append(spread(ratios, ".2f", median(ratios or [0])))
        final = [100 * cell["ranks"][0]["accuracy"] for cell in own]
        alike = [100 * equal[cell["round"]][side] for cell in own]
        rows.append([*row, *(spread(values, ".1f", fmean(values)) for values in (final, alike))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{widths[0]}}" if i == 0 else f"{cell:>{widths[i]}}" for i, cell in enumerate(row))
        for row in rows
    ]
    return "\n".join([*lines, *failures])


# ---- the command ------------------------------------------------------------------------------------------


def options_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scenario", default="clean", help="name or file.toml (default: clean)")
    add("--loopback", action="store_true", help="no testbed: all ranks on 127.0.0.1")
    add("--hosts", type=int, help="ranks, one on each host (default: the scenario's; 4 on loopback)")
    add("--rate-mbit", type=float, help="of the ports, instead of the scenario's")
    add("--mtu", type=int, help="instead of the scenario's")
    add("--tcp", help="congestion control on the hosts, such as cubic (default: the machine's)")
    add("--sides", default="tailcut,gloo,fp16,bf16,powersgd", help="tailcut:FIELD=VALUE,... has its Config")
    add("--rounds", type=int, default=3, help="each with a seed of its own (default: 3)")
    add("--seconds", type=float, default=30.0, help="of timed training per side and round (default: 30)")
    add("--batch", type=int, default=64, help="images per rank and step (default: 64)")
    add("--eval-every", type=int, default=25, metavar="STEPS", help="rank 0 evaluates (default: 25)")
    add("--data", help="directory of Fashion-MNIST's four .gz files, or: digits (default: $TAILCUT_DATA)")
    add("--json", type=Path, metavar="FILE", help="everything that was measured")
    return parser.parse_args(words)


def data_directory(given: str | None) -> str | None:
    """None is scikit-learn's digits."""
    if given == "digits":
        return None
    default = ROOT.parent / "shared/data/fashion-mnist"
    directory = Path(given or os.environ.get("TAILCUT_DATA") or default)
    if (directory / "train-images-idx3-ubyte.gz").exists():
        return str(directory.resolve())
    if given:
        raise ConfigError(f"{given} has no train-images-idx3-ubyte.gz; --data digits takes scikit-learn's")
    print(f"no Fashion-MNIST in {directory} (--data): scikit-learn's digits instead", file=sys.stderr)
    return None


def scenario_of(options: argparse.Namespace) -> Scenario:
    hosts = {} if options.hosts is None else {"hosts": options.hosts}
    scenario = load_scenario(options.scenario, **hosts)
    changes = {"rate_mbit_s": options.rate_mbit, "mtu_bytes": options.mtu}
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(scenario, port=dataclasses.replace(scenario.port, **given))


@contextlib.contextmanager
def place_of(options: argparse.Namespace) -> Iterator[tuple[Place, int, str]]:
    """Where cells run, how many ranks there are, and what to say of it."""
    if options.loopback:
        if options.tcp or options.rate_mbit or options.mtu:
            raise ConfigError("--tcp, --rate-mbit and --mtu are for a testbed, not for --loopback")
        ranks = options.hosts or 4
        tcp = Path(CONGESTION_CONTROL).read_text().strip()
        yield OnLoopback(ranks), ranks, f"{ranks} ranks on loopback; TCP: {tcp}"
        return
    become_root_of_a_namespace()
    with Testbed.up(scenario_of(options)) as testbed:
        for host in testbed.hosts:
            inside = ("netns", "exec", host.namespace, "sh", "-c")
            if options.tcp:
                system.run("ip", *inside, f"echo {options.tcp} >{CONGESTION_CONTROL}")
            tcp = system.run("ip", *inside, f"cat {CONGESTION_CONTROL}").strip()
        testbed.begin_background()
        yield OnTestbed(testbed), len(testbed.hosts), f"{testbed.summary()}; TCP: {tcp}"


def commit() -> str | None:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def measure(options: argparse.Namespace) -> None:
    sides = parse_sides(options.sides)
    data = data_directory(options.data)
    cells: list[dict[str, Any]] = []
    with place_of(options) as (place, ranks, what):
        print(f"{what}; batch {options.batch} per rank, {data or 'digits'}", file=sys.stderr)
        start_s = time.monotonic()
        count = options.rounds * len(sides)
        for number in range(options.rounds):
            turn = number % len(sides)
            for side in [*sides[turn:], *sides[:turn]]:
                each_s = (time.monotonic() - start_s) / len(cells) if cells else options.seconds + OVERHEAD_S
                left_s = (count - len(cells)) * each_s
                where = f"[{len(cells) + 1}/{count}, {left_s / 60:.1f} min left] {side.name}"
                print(where, file=sys.stderr, end=": ", flush=True)
                order = {
                    "kind": side.kind,
                    "config": side.config,
                    "data": data,
                    "seed": number,
                    "batch": options.batch,
                    "seconds": options.seconds,
                    "eval_every": options.eval_every,
                }
                port = free_port() if options.loopback else FIRST_PORT + len(cells)
                cell = run_cell(place, ranks, order, port)
                cells.append({"side": side.name, "round": number, "seed": number, **cell})
                print(told(cells[-1]), file=sys.stderr, flush=True)
                if options.json:
                    write_json(options, what, data, cells)
    print(table([side.name for side in sides], cells))


def told(cell: dict[str, Any]) -> str:
    if cell["failed"]:
        return f"failed: {cell['failed']}"
    p50_s, p99_s = (percentile(pooled_s(cell), q) for q in (50, 99))
    first = cell["ranks"][0]
    text = f"{steps(cell)} steps, p50 {1e3 * p50_s:.0f} ms, p99 {1e3 * p99_s:.0f} ms, "
    text += f"accuracy {first['accuracy']:.1%}"
    return f"{text}; {first['stats_text']}" if "stats_text" in first else text


def write_json(options: argparse.Namespace, what: str, data: str | None, cells: list[dict[str, Any]]) -> None:
    document = {
        "what": what,
        "commit": commit(),
        "machine": machine.describe(),
        "options": {**vars(options), "json": str(options.json), "data": data or "digits"},
        "cells": cells,
    }
    options.json.write_text(json.dumps(document))


def main(words: list[str] | None = None) -> None:
    try:
        measure(options_of(words))
    except TailcutError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
