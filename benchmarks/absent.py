"""What does a rank that is stuck or dead cost the others? Processes on this machine, over real sockets.

In every round two groups run in turns: one whose last rank gets into trouble half way, and one that never had
that rank. The figures are those of rank 0 of both: the time of an op before the trouble, the first ops of it,
and those from the third on, with their ratio to the group without that rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection

import numpy as np

import tailcut

TROUBLES = ("stuck", "dead")
CHANGE_OPS = 2
"""The ops of the change, which wait until their bounds."""


def be_rank(rank: int, ranks: int, directory: str, options: argparse.Namespace, to: Connection) -> None:
    """Average ``options.ops`` times; the rank in trouble stops half way. Rank 0 tells how long ops took."""
    bucket = np.ones(options.count, np.float32)
    troubled = rank == ranks - 1 and ranks == options.ranks
    times_s = []
    with tailcut.Group(rank, ranks, tailcut.FileStore(directory), deadline_s=options.deadline_s) as group:
        for op in range(options.ops):
            if troubled and op == options.ops // 2:
                stop(options.trouble)
            time.sleep(options.compute_ms / 1e3)
            start = time.perf_counter()
            group.allreduce(bucket, "bucket").wait()
            times_s.append(time.perf_counter() - start)
        if rank == 0:
            to.send(times_s)
        group.close(linger_s=0.0)


def stop(trouble: str) -> None:
    """Enter no more ops. The engine goes on, or the process is gone."""
    if trouble == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(60)


def times_of(ranks: int, options: argparse.Namespace) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            context.Process(target=be_rank, args=(rank, ranks, directory, options, theirs), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            if not ours.poll(options.limit_s):
                raise SystemExit(f"rank 0 has not ended within {options.limit_s:g} s")
            times_s: list[float] = ours.recv()
            return times_s
        finally:
            for process in processes:
                process.kill()
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trouble", choices=TROUBLES, default="stuck")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ops", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1 << 18, help="coordinates per bucket")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="a pause before each op")
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one group")
    options = parser.parse_args()
    print(
        f"{options.ranks} ranks, {options.count} coordinates, rank {options.ranks - 1} {options.trouble}; ms"
    )
    print(f"{'before':>10}{'first two':>20}{'then p50':>10}{'p99':>8}{'without it p50':>16}{'ratio':>8}")
    ratios = []
    for _ in range(options.rounds):
        times_ms = 1e3 * np.array(times_of(options.ranks, options))
        without_ms = 1e3 * np.array(times_of(options.ranks - 1, options))
        half = options.ops // 2
        before, change, after = times_ms[20:half], times_ms[half:][:CHANGE_OPS], times_ms[half + CHANGE_OPS :]
        ratios.append(np.median(after) / np.median(without_ms[half:]))
        print(
            f"{np.median(before):>10.2f}{', '.join(f'{t:.1f}' for t in change):>20}{np.median(after):>10.2f}"
            f"{np.percentile(after, 99):>8.2f}{np.median(without_ms[half:]):>16.2f}{ratios[-1]:>8.2f}",
            flush=True,
        )
    print(f"ratio of p50: {np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
