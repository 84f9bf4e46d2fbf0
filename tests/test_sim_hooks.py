"""Policies in the simulator: asked at every entry, told of every report, by rank and in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from tailcut import Report, Scenario, _native, simulate
from tailcut.policy.deadline import fixed_bounds


class Halving:
    """Starts at 16 planes and halves them after every op."""

    def __init__(self) -> None:
        self.planes = 16
        self.asked: list[int] = []
        self.told: list[tuple[int, float]] = []

    def terms(self, length: int) -> _native.Terms:
        self.asked.append(length)
        return _native.Terms(fixed_bounds(0.1), self.planes)

    def after(self, report: Report, now_s: float) -> None:
        self.told.append((report.seq, now_s))
        self.planes = max(1, self.planes // 2)


def test_a_policy_decides_each_op_from_the_reports_before() -> None:
    scenario = Scenario(ranks=3, length=5000, ops=4, codec="planes")
    policies = [Halving() for _ in range(3)]
    simulation = simulate(scenario, policies=policies)
    for rank, policy in enumerate(policies):
        assert [report.scatter.planes for report in simulation.reports(rank)] == [16, 8, 4, 2]
        assert policy.asked == [5000] * 4
        ended = [native.ended_at / 1e9 for native in simulation.native.reports[rank]]
        assert policy.told == list(zip(range(4), ended, strict=True))


def test_without_decisions_of_its_own_a_policy_changes_nothing() -> None:
    class Fixed:
        def terms(self, length: int) -> _native.Terms:
            return _native.Terms(fixed_bounds(0.1), 16)

        def after(self, report: Report, now_s: float) -> None:
            pass

    scenario = Scenario(ranks=4, length=5000, ops=3, loss=0.05, record=True)
    plain, steered = simulate(scenario), simulate(scenario, policies=[Fixed()] * 4)
    assert np.array_equal(plain.native.deliveries(), steered.native.deliveries())
    assert plain.outcomes == steered.outcomes


def test_an_exception_of_a_policy_ends_the_simulation() -> None:
    class Broken(Halving):
        def after(self, report: Report, now_s: float) -> None:
            raise LookupError("no such bound")

    with pytest.raises(LookupError, match="no such bound"):
        simulate(Scenario(ranks=2), policies=[Broken(), Halving()])
