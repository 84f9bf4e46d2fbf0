"""Rule 9: what is late enters a later op of its bucket, all of it and once.

The sum of a rank's results over all ops is then the sum of the means of all contributions, whoever was
late and why. So ops with tight bounds and every kind of trouble are followed by some that wait for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tailcut import Scenario, Simulation, _native, simulate
from tailcut.policy.deadline import to_native
from tailcut.report import Report
from tailcut.simulation import Freeze, Hang, Partition
from tailcut.simulation.network import Bursts
from tailcut.stats import OpBounds

PATIENT_OPS = 24
"""The ops at the end that wait for all. The time between them is enough for everything that is late."""
PATIENT = OpBounds(3, 3, 3, 1, 1, 5)
CHANGED = {"raw": 2e-4, "planes": 2e-2}
"""How far sums may differ by rounding: 120 ops of 32-bit floats, or of 16 planes."""


class ThenPatient:
    """The policy of a rank that does not wait, until the last ops."""

    def __init__(self, scenario: Scenario, bounds: OpBounds) -> None:
        self._left = scenario.ops
        self._hasty, self._patient = (_native.Terms(to_native(b), scenario.planes) for b in (bounds, PATIENT))

    def terms(self, length: int) -> _native.Terms:
        self._left -= 1
        return self._patient if self._left < PATIENT_OPS else self._hasty

    def after(self, report: Report, now_s: float) -> None: ...


def run(bounds: OpBounds, *, ops: int, ranks: int, compute_s: float = 1e-4, **scenario: Any) -> Simulation:
    compute = np.full((ops, ranks), compute_s)
    compute[-PATIENT_OPS:] = 60e-3
    # A window that nothing is too late for: what is late for more than a sixteenth of it is given up.
    values = Scenario(
        ops=ops, ranks=ranks, deadline_s=5, compute_s=compute.tolist(), window_ops=4096, **scenario
    )
    return simulate(values, policies=[ThenPatient(values, bounds) for _ in range(ranks)])


def lost(simulation: Simulation) -> float:
    """The largest difference of a coordinate between what was contributed and what was applied, over all
    ranks."""
    buckets, worst = simulation.scenario.buckets, 0.0
    for bucket in range(buckets):
        means = np.sum([np.mean(op, 0, np.float64) for op in simulation.inputs[bucket::buckets]], 0)
        applied = np.sum(simulation.results[bucket::buckets], 0, np.float64)
        worst = max(worst, float(np.abs(applied - means).max()))
    return worst


def times(
    rng: np.random.Generator, ranks: int, until_s: float, every_s: float
) -> Iterator[tuple[int, float, float]]:
    """Some ranks and times at which something happens to them."""
    for rank in range(ranks):
        at_s = rng.exponential(every_s)
        while at_s < until_s:
            ends_s = at_s + rng.uniform(1e-3, 6e-3)
            yield rank, at_s, ends_s
            at_s = ends_s + rng.exponential(every_s)


@pytest.mark.parametrize("seed", range(50))
def test_all_that_is_late_is_used_once(seed):
    rng = np.random.default_rng(seed)
    ranks, buckets = int(rng.choice([2, 3, 4, 8])), int(rng.choice([1, 1, 2, 3]))
    codec = str(rng.choice(["raw", "planes"]))
    trouble: dict[str, Any] = {
        "loss": rng.choice([0, 0, 0.02, 0.1, 0.3]),
        "duplicate": rng.choice([0, 0.2]),
        "jitter_s": rng.choice([0, 0, 0.3e-3, 2e-3]),
    }
    if rng.random() < 0.4:
        trouble["hangs"] = [Hang(*at) for at in times(rng, ranks, 0.1, 10e-3)]
    if rng.random() < 0.4:
        trouble["freezes"] = [Freeze(*at) for at in times(rng, ranks, 0.05, 30e-3)]
    if rng.random() < 0.4:
        cuts = times(rng, ranks, 0.05, 30e-3)
        trouble["partitions"] = [Partition(from_s, until_s, (rank,)) for rank, from_s, until_s in cuts]
    if rng.random() < 0.3:
        bursts = Bursts(volume_bytes=200_000, gap_min_s=5e-3, gap_mean_s=6e-3)
        trouble |= {"bytes_per_s": 1e8, "bursts": bursts}
    scatter_s, gather_s = rng.choice([0.05e-3, 0.2e-3, 0.8e-3], 2)
    grace_s = rng.choice([0.02e-3, 0.1e-3])
    simulation = run(
        OpBounds(scatter_s, scatter_s, gather_s, grace_s, grace_s, 1),
        ops=int(rng.choice([60, 120])),
        ranks=ranks,
        length=int(rng.choice([1, 63, 64, 65, 700, 2410, 5000])),
        buckets=buckets,
        depth=int(rng.integers(1, buckets + 1)),
        codec=codec,
        packet_bytes=int(rng.choice([256, 1280])),
        seed=seed,
        **trouble,
    )
    assert lost(simulation) < CHANGED[codec]


@pytest.mark.parametrize("codec", CHANGED)
def test_an_empty_mean_does_not_erase_the_late_contribution(codec):
    """Rank 0 is frozen. Rank 1 is alone and sends EMPTY, which rank 0 finds when it enters."""
    hasty = OpBounds(0.8e-3, 0.8e-3, 0.05e-3, 0.1e-3, 0.1e-3, 1)
    frozen = [Freeze(0, 2.05e-3, 8e-3)]
    simulation = run(hasty, ops=60, ranks=2, length=640, buckets=1, codec=codec, freezes=frozen)
    assert any(report.gather.empty for report in simulation.reports(0))
    assert lost(simulation) < CHANGED[codec]


@pytest.mark.parametrize("codec", CHANGED)
def test_a_shard_without_coordinates_is_answered_after_somebody_was_late(codec):
    """A bucket shorter than a granule for each rank has such shards. Their owner was late for its own."""
    hasty = OpBounds(0.8e-3, 0.8e-3, 0.05e-3, 0.1e-3, 0.1e-3, 1)
    hangs = [Hang(0, 1e-3, 4e-3), Hang(1, 6e-3, 9e-3)]
    simulation = run(hasty, ops=60, ranks=2, length=64, buckets=2, codec=codec, hangs=hangs)
    for rank in range(2):
        patient = simulation.reports(rank)[-PATIENT_OPS:]
        assert [report.status for report in patient] == ["complete"] * PATIENT_OPS
        assert simulation.native.counters[rank].rejected["shape"] == 0
    assert lost(simulation) < CHANGED[codec]


UNEVEN = (1.0, 2.0**25, -(2.0**25))
"""In this order they add up to 0, because 1 is lost in rounding. In any other the sum is 1."""


@pytest.mark.parametrize("by", ["op", "rank"])
def test_late_contributions_add_up_in_the_order_of_ops_and_ranks(by: str) -> None:
    """All but rank 0 hang in the first op. What they send then enters the fourth."""
    ranks, ops = (2, 6) if by == "op" else (4, 6)
    late = {(i, 1) if by == "op" else (0, 1 + i): value for i, value in enumerate(UNEVEN)}
    inputs = [
        [np.full(64 * ranks, late.get((op, rank), 0.0), np.float32) for rank in range(ranks)]
        for op in range(ops)
    ]
    compute_s = np.zeros((ops, ranks))
    compute_s[0, 1:], compute_s[3, 0] = 0.5, 0.6
    scenario = Scenario(
        ranks=ranks, length=64 * ranks, ops=ops, buckets=1, compute_s=compute_s.tolist(), deadline_s=0.1
    )
    simulation = simulate(scenario, inputs=inputs)
    assert sum(counters.carried_contributions for counters in simulation.native.counters) > 0
    assert not any(result.any() for op in simulation.results for result in op)


class Hasty:
    """A policy that waits this long."""

    def __init__(self, bound_s: float = 0.8e-3) -> None:
        self._bounds = OpBounds(bound_s, bound_s, bound_s, bound_s / 8, bound_s / 8, 1)

    def terms(self, length: int) -> _native.Terms:
        return _native.Terms(to_native(self._bounds), 16)

    def after(self, report: Report, now_s: float) -> None: ...


def test_nothing_stands_in_for_a_late_mean_on_a_rank_that_abstains() -> None:
    """Rank 1 fell behind the window and contributes nothing. Rank 0 is late later, so its mean is too."""
    compute_s = np.full((40, 2), 1e-3)
    compute_s[30:33, 0] = 20e-3
    scenario = Scenario(
        ranks=2,
        ops=40,
        length=256,
        buckets=1,
        deadline_s=1,
        compute_s=compute_s.tolist(),
        window_ops=4,
        freezes=[Freeze(1, 3e-3, 30e-3)],
    )
    simulation = simulate(scenario, policies=[Hasty(), Hasty()])
    short = [
        result[1]
        for report, result in zip(simulation.reports(1), simulation.results, strict=False)
        if report.gather.missing and not report.contributed
    ]
    assert short
    assert not any(result.any() for result in short)


def test_nothing_stands_in_for_a_late_mean_where_the_own_gradient_is_not_finite() -> None:
    """Rank 1 is cut off after it has heard rank 0, and before its last value, an Inf, came."""
    length, key = 20_000, 1
    scenario = Scenario(
        ranks=2,
        ops=2,
        length=length,
        buckets=1,
        deadline_s=1,
        bytes_per_s=2e6,
        compute_s=[[0, 0], [0.1, 0.1]],
        partitions=[Partition(10e-3, 60e-3, (0,))],
    )
    shard = next(s for s in range(2) if _native.owner_of(s, 0, 2, scenario.seed, key) == 0)
    begin, end = _native.shard_range(length, 2, shard)
    inputs = [[np.ones(length, np.float32) for _ in range(2)] for _ in range(2)]
    inputs[0][1][end - 1] = np.inf
    simulation = simulate(scenario, inputs=inputs, policies=[Hasty(15e-3), Hasty(15e-3)])
    report = simulation.reports(1)[0]
    assert report.link(0).gather.missing == end - begin
    assert not report.non_finite
    np.testing.assert_array_equal(simulation.results[0][1][begin:end], 0)
