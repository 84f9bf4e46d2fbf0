"""What crosses the network between two sites: a flat group, and a grid with a row for each site.

    python benchmarks/grid_wan.py                      # bytes, simulated: the table of docs/grid.md
    sudo python benchmarks/grid_wan.py --testbed       # also the time of an op on the scenario cross-dc

Bytes are those of all DATA datagrams of an op that go from one site to the other, headers included. Nothing
is lost, so they are exact. The time of an op is that of all ops of a run, back to back, over their number. It
is the median of the runs; both sides take turns at going first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import tailcut
from tailcut import _native
from tailcut.tools.testbed import Testbed, load_scenario

PLANES = (4, 8, 16)
SITES = 2
PACKET_BYTES = 1408  # of payload: what Ethernet's 1500 bytes leave
WARM_UP_OPS = 3
LIMIT_S = 600


def crossing_bytes(*, ranks: int, rows: int, planes: int, length: int) -> float:
    """Of one op, from one site to the other, on average over both directions."""
    simulation = tailcut.simulate(
        tailcut.Scenario(
            ranks=ranks,
            rows=rows,
            length=length,
            codec="planes",
            planes=planes,
            packet_bytes=PACKET_BYTES,
            deadline_s=60.0,
            elided=True,
            record=True,
        )
    )
    packets = simulation.native.deliveries()
    second_site = ranks // SITES
    crossing = packets[(packets["source"] < second_site) != (packets["destination"] < second_site)]
    return float(np.sum(crossing["payload_bytes"] + _native.HEADER_BYTES)) / SITES


def be_rank(rank: int, ranks: int, directory: str, rows: int, planes: int, ops: int, length: int) -> None:
    config = tailcut.Config(rows=rows, planes=planes, codec="planes", deadline_s=20.0, rendezvous_s=60.0)
    gradient = np.random.default_rng(rank).standard_normal(length, np.float32)
    with tailcut.Group(rank, ranks, tailcut.FileStore(directory), config) as group:
        for op in range(WARM_UP_OPS + ops):
            if op == WARM_UP_OPS:
                began_s = time.monotonic()
            group.allreduce(gradient.copy(), key="gradient").wait()
        print((time.monotonic() - began_s) / ops, flush=True)


def op_s(testbed: Testbed, ranks: int, rows: int, planes: int, ops: int, length: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            testbed.spawn(
                rank,
                [
                    *(sys.executable, __file__, "--be-rank", str(rank), str(ranks), directory),
                    *(str(rows), str(planes), str(ops), str(length)),
                ],
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        return max(float(worker.communicate(timeout=LIMIT_S)[0]) for worker in workers)


def count_bytes(options: argparse.Namespace) -> None:
    print("ranks  planes   flat, MB   rows, MB   ratio     between the sites, each way")
    for ranks in (4, 8):
        for planes in PLANES:
            flat, grid = (
                crossing_bytes(ranks=ranks, rows=rows, planes=planes, length=options.length)
                for rows in (1, SITES)
            )
            print(f"{ranks:5}{planes:8}{flat / 1e6:11.2f}{grid / 1e6:11.2f}{grid / flat:8.2f}", flush=True)


def time_ops(options: argparse.Namespace) -> None:
    print("planes   flat, ms   rows, ms   ratio     on cross-dc")
    scenario = load_scenario("cross-dc")
    with Testbed.up(scenario) as testbed:
        for planes in PLANES:
            found: dict[int, list[float]] = {1: [], SITES: []}
            for round_number in range(options.rounds):
                for rows in (1, SITES) if round_number % 2 == 0 else (SITES, 1):
                    found[rows].append(
                        op_s(testbed, len(testbed.hosts), rows, planes, options.ops, options.length)
                    )
            flat_s, grid_s = (statistics.median(found[rows]) for rows in (1, SITES))
            print(f"{planes:6}{1e3 * flat_s:11.0f}{1e3 * grid_s:11.0f}{grid_s / flat_s:8.2f}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--be-rank"]:
        rank, ranks, directory, *rest = sys.argv[2:]
        be_rank(int(rank), int(ranks), directory, *map(int, rest))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1 << 20, help="coordinates of a bucket")
    parser.add_argument("--testbed", action="store_true", help="time ops on the scenario cross-dc, as root")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side on the testbed")
    parser.add_argument("--ops", type=int, default=10, help="in a run on the testbed")
    options = parser.parse_args()
    count_bytes(options)
    if options.testbed:
        time_ops(options)


if __name__ == "__main__":
    main()
