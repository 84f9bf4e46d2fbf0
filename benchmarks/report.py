"""How long does Python take for the report of an op, and for the policies that learn from it?"""

from __future__ import annotations

import argparse
import time
import timeit

from tailcut import Report, Scenario, simulate
from tailcut.grid import GridLayout
from tailcut.policy.grid import GridSteering
from tailcut.report import outcome_of

REPEATS = 25
CASES = ((4, 0.0), (4, 0.02), (64, 0.0), (64, 0.02))
"""Ranks, and the share of packets that are lost."""


def best_us(call: object, calls: int) -> float:
    """The time of one call."""
    took_s = timeit.repeat(call, number=calls, repeat=REPEATS, timer=time.process_time)
    return 1e6 * min(took_s) / calls


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'ranks':>6}{'loss':>7}{'report (µs)':>14}{'policies (µs)':>16}")
    for ranks, loss in CASES:
        scenario = Scenario(ranks=ranks, length=320 * ranks, ops=3, loss=loss, resend=False, elided=True)
        native = simulate(scenario).native.reports[1][-1]
        grid = GridLayout(ranks)
        steering = GridSteering(rank=1, grid=grid, deadline_s=10.0, planes=16)
        report = outcome_of(native, grid, 1)
        if not isinstance(report, Report):
            raise SystemExit(report)
        calls = 20_000 // ranks
        report_us = best_us(lambda: outcome_of(native, grid, 1), calls)  # noqa: B023
        policies_us = best_us(lambda: steering.after(report, 1.0), calls)  # noqa: B023
        print(f"{ranks:>6}{loss:>7.0%}{report_us:>14.1f}{policies_us:>16.1f}")


if __name__ == "__main__":
    main()
