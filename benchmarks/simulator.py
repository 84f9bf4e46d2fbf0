"""How many packets per CPU-second does the simulator carry? The real protocol core, in virtual time."""

from __future__ import annotations

import argparse
import time

import numpy as np

from tailcut import _native
from tailcut.policy.deadline import fixed_bounds

MS = 1_000_000
CASES = (
    # ranks, coordinates, ops, loss
    (4, 1_000_000, 5, 0.0),
    (16, 1_000_000, 2, 0.0),
    (64, 500_000, 1, 0.0),
    (256, 256 * 64, 2, 0.0),
    (16, 1_000_000, 2, 0.01),
)


def simulate(ranks: int, count: int, ops: int, loss: float) -> tuple[_native.SimResult, float]:
    """One run and the CPU-seconds it took. The result is checked when nothing is lost."""
    spec = _native.SimSpec()
    spec.ranks = ranks
    spec.seed = 1
    spec.loss = loss
    spec.terms = _native.Terms(fixed_bounds(0.1), 16)
    spec.linger_ns = 100 * MS
    spec.compute_ns = [[0] * ranks for _ in range(ops)]
    spec.ops_by_rank = [ops] * ranks
    spec.record = False
    rng = np.random.default_rng(0)
    buckets = [[rng.standard_normal(count, np.float32) for _ in range(ranks)] for _ in range(ops)]
    answers = [sum(op[1:], op[0].copy()) / np.float32(ranks) for op in buckets]
    start = time.process_time()
    result = _native.simulate(spec, buckets)
    elapsed_s = time.process_time() - start
    if not loss:
        for op, answer in zip(buckets, answers, strict=True):
            if not all(np.array_equal(bucket, answer) for bucket in op):
                raise SystemExit(f"wrong result: {ranks} ranks, {count} coordinates")
    return result, elapsed_s


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(
        f"{'ranks':>6}{'count':>10}{'ops':>5}{'loss':>7}{'packets':>10}{'CPU (s)':>10}{'packets/CPU-s':>16}"
    )
    for ranks, count, ops, loss in CASES:
        result, elapsed_s = simulate(ranks, count, ops, loss)
        packets = result.fates["delivered"]
        rate = packets / elapsed_s
        print(f"{ranks:>6}{count:>10}{ops:>5}{loss:>7.0%}{packets:>10}{elapsed_s:>10.2f}{rate:>16,.0f}")


if __name__ == "__main__":
    main()
