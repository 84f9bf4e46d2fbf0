"""Is everything that was late applied in the end, on real sockets?

    sudo python benchmarks/conservation.py --scenario bursts --seconds 60

There is one process per host of a testbed. Ops come in segments: first those with known whole numbers, then
some with zeros. Sums and means of these numbers are exact, so after a segment each coordinate of what a rank
has applied equals the sum of the means, or lacks something that was late by more ops than there are zeros.
After the last segment the ops of zeros are done once more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

import tailcut
from tailcut.tools.testbed import Testbed, load_scenario
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

UNIT = 12
"""A multiple of every number of ranks up to four, so that their mean is whole."""
LIMIT_S = 600.0


def numbers(seed: int, op: int, rank: int, count: int) -> np.ndarray:
    random = np.random.default_rng((seed, op, rank))
    return (random.integers(-9, 10, count, np.int8) * np.float32(UNIT)).astype(np.float32)


def be_rank(rank: int, ranks: int, directory: str, order: dict[str, Any]) -> None:
    count, live_ops, quiet_ops = order["count"], order["ops"], order["late_ops"]
    config = tailcut.Config(codec="raw", seed=order["seed"], rendezvous_s=60.0)
    applied, due = np.zeros(count), np.zeros(count)
    energy, lacking, partial, ops = 0.0, [], 0, 0
    store = tailcut.FileStore(directory)
    bucket = np.empty(count, np.float32)

    with tailcut.Group(rank, ranks, store, config) as group:

        def allreduce(values: np.ndarray | float) -> None:
            nonlocal partial, ops
            bucket[:] = values
            partial += group.allreduce(bucket, key="bucket").wait().status != "complete"
            np.add(applied, bucket, out=applied)
            ops += 1

        # All ranks do the same ops: rank 0 says before a segment whether it is the last.
        until_s = time.monotonic() + order["seconds"]
        for segment in range(sys.maxsize):
            if rank == 0:
                store.set(f"last {segment}", b"1" if time.monotonic() > until_s else b"0")
            last = store.get(f"last {segment}") == b"1"
            for op in range(segment * live_ops, (segment + 1) * live_ops):
                shares = [numbers(order["seed"], op, other, count) for other in range(ranks)]
                mean = np.mean(shares, axis=0, dtype=np.float64)
                due += mean
                energy += float(mean @ mean)
                allreduce(shares[rank])
            for _ in range(quiet_ops):
                allreduce(0.0)
            lacking.append(int((applied != due).sum()))
            if last:
                break
        for _ in range(quiet_ops):
            allreduce(0.0)
        stats = group.stats()
    rest = applied - due
    found = {
        "segments": len(lacking),
        "ops": ops,
        "partial": partial,
        "lacking": lacking,
        "missing_energy": float(rest @ rest) / energy,
        "carried_contributions": stats.carried_contributions,
        "carried_means": stats.carried_means,
        "dropped_late_coords": stats.dropped_late_coords,
    }
    print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace) -> None:
    scenario = load_scenario(options.scenario)
    if UNIT % scenario.hosts:
        raise SystemExit(f"conservation: {scenario.name} has {scenario.hosts} hosts; up to four are exact")
    order = json.dumps(vars(options))
    become_root_of_a_namespace()
    with Testbed.up(scenario) as testbed, tempfile.TemporaryDirectory() as directory:
        ranks = len(testbed.hosts)
        print(testbed.summary(), flush=True)
        argv = (sys.executable, __file__, "--be-rank")
        workers = [
            testbed.spawn(rank, [*argv, str(rank), str(ranks), directory, order], stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        testbed.begin_faults()
        testbed.begin_background()
        try:
            outputs = [worker.communicate(timeout=options.seconds + LIMIT_S)[0] for worker in workers]
        finally:
            testbed.end_faults()
            testbed.end_background()
    for rank, output in enumerate(outputs):
        found = json.loads(output or "null")
        if found is None:
            raise SystemExit(f"conservation: rank {rank} failed")
        live = found["segments"] * options.ops * options.count
        print(
            f"rank {rank}: {found['ops']} ops, {found['partial']} of them partial; carried "
            f"{found['carried_contributions'] / 1e6:.1f} M coordinates of contributions and "
            f"{found['carried_means'] / 1e6:.1f} M of means, dropped {found['dropped_late_coords']}; within "
            f"{options.late_ops} ops {1 - sum(found['lacking']) / live:.5%} were applied; at the end "
            f"{found['missing_energy']:.1e} of the energy is missing"
        )


def main() -> None:
    if sys.argv[1:2] == ["--be-rank"]:
        rank, ranks, directory, order = sys.argv[2:]
        return be_rank(int(rank), int(ranks), directory, json.loads(order))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", default="bursts", help="of at most four hosts (default: bursts)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=400_000, help="coordinates of the bucket")
    parser.add_argument("--ops", type=int, default=40, help="with numbers, in a segment")
    parser.add_argument("--late-ops", type=int, default=20, help="with zeros after them")
    parser.add_argument("--seed", type=int, default=0)
    return measure(parser.parse_args())


if __name__ == "__main__":
    main()
