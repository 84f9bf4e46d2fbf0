"""Elided values: the same fates, times and reports as with values, for the same seed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tailcut import Report, Scenario, TailcutError, simulate
from tailcut.epsilon import Epsilon
from tests.test_schedules import schedule


def history(scenario: Scenario) -> tuple[object, ...]:
    simulation = simulate(scenario)
    native = simulation.native
    reports = [
        [
            (report.ticket, report.status, report.entered_at, report.closed_at, report.ended_at)
            for report in reports
        ]
        for reports in native.reports
    ]
    held = [[report.held() for report in reports] for reports in native.reports]
    return (
        native.deliveries().tolist(),
        native.fates,
        native.events,
        native.closed_at_ns,
        reports,
        held,
        [[_without_quality(outcome) for outcome in outcomes] for outcomes in simulation.outcomes],
    )


def _without_quality(outcome: Report | TailcutError) -> Report | TailcutError:
    """Errors of values that are there are measured, of others expected."""
    if not isinstance(outcome, Report):
        return outcome
    column = tuple(_without_quality(report) for report in outcome.column)
    return dataclasses.replace(outcome, epsilon=Epsilon(), correlation=0.0, column=column)


@pytest.mark.parametrize("seed", range(120))
def test_raw_without_values_has_the_history_that_it_has_with_them(seed: int) -> None:
    scenario = schedule(seed)
    assert history(scenario) == history(dataclasses.replace(scenario, elided=True))


@pytest.mark.parametrize("planes", [16, 9])
@pytest.mark.parametrize("seed", [1, 2, 6, 7, 13])
def test_so_do_planes_of_gaussian_blocks(seed: int, planes: int) -> None:
    """Whole blocks, nothing trimmed: whether gains are sent is a matter of values, which are not there."""
    faults = schedule(seed)
    scenario = dataclasses.replace(
        faults, codec="planes", planes=planes, length=faults.ranks << 15, trim=0.0, trim_bytes=256, depth=1
    )
    assert history(scenario) == history(dataclasses.replace(scenario, elided=True))


def test_elided_buckets_take_no_memory() -> None:
    """With values, 16 ranks of 100 MB would need several gigabytes."""
    code = """
from pathlib import Path
from tailcut import Scenario, simulate
scenario = Scenario(ranks=16, length=25_000_000, ops=2, elided=True, packet_bytes=60_000, pool_bytes=1 << 30)
assert all(report.status == "complete" for report in simulate(scenario).reports(15))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0])  # not ru_maxrss, which remembers the parent's
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 400_000  # kB
