"""Slow ports (docs/epochs.md) in virtual time: what owning less does to the group, and that healthy groups
never change owners. What one rank sees is in test_policy_ports.py, the agreement in test_policy_epochs.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailcut import Scenario, Simulation, simulate
from tailcut.simulation.network import Bursts, RateChange

OPS = 340
BYTES_PER_S = 25e6  # 200 Mbit/s
LENGTH = 1_600_000
PLANES = 4
IN_FLIGHT = 3  # buckets, as with DDP


def run(ranks: int, speed: float = 1.0, ops: int = OPS, **more: Any) -> Simulation:
    """The last rank's port has some share of the others' rate."""
    values: dict[str, Any] = {
        "length": LENGTH,
        "codec": "planes",
        "planes": PLANES,
        "bytes_per_s": BYTES_PER_S,
        "rate_changes": [RateChange(0.0, ranks - 1, speed, speed)],
        "queue_bytes": 250_000,
        "frame_bytes": 42,
        "packet_bytes": 1400,
        "delay_s": 1e-4,
        "depth": IN_FLIGHT,
        "buckets": IN_FLIGHT,
        "deadline_s": 20.0,
        "window_ops": 256,
        "pool_bytes": 256 << 20,
        "paced": True,
        "steering": True,
        "epochs": True,
        "elided": True,
    }
    return simulate(Scenario(ranks=ranks, ops=ops, **{**values, **more}))


def op_s(simulation: Simulation, epoch: int, rank: int = 0) -> float:
    """The mean time from op to op in an epoch, without its first ones."""
    ends = [(r.ended_at, r.epoch) for r in simulation.native.reports[rank]]
    times = sorted(at for at, of in ends if of == epoch)[20:]
    return (times[-1] - times[0]) / 1e9 / (len(times) - 1)


def epochs(simulation: Simulation) -> set[int]:
    return {r.epoch for rank in range(simulation.scenario.ranks) for r in simulation.reports(rank)}


def least_s(ranks: int, speed: float) -> float:
    """What no shares can beat: a port moves 1 + w(n - 2) buckets each way."""
    bucket_s = LENGTH * PLANES / 8 / BYTES_PER_S
    alike = (2 * ranks - 2) / (ranks - 1 + speed)  # if a share makes all ports equally long busy
    return bucket_s * max(alike, 1 / speed)


@pytest.mark.parametrize(("ranks", "speed"), [(4, 2 / 3), (4, 0.5), (4, 0.25), (8, 0.5)])
def test_a_slow_port_costs_little_more_than_it_must(ranks: int, speed: float) -> None:
    simulation = run(ranks, speed)
    assert epochs(simulation) == {0, 1}
    before_s, after_s = op_s(simulation, 0), op_s(simulation, 1)
    assert after_s < 0.85 * before_s
    assert after_s < 1.3 * least_s(ranks, speed)
    late = [report.lost_frac for report in simulation.reports(0)[-50:]]  # carried, within the budget
    assert sum(late) / len(late) < 0.01


def test_where_owning_less_does_not_help_it_is_taken_back() -> None:
    """One op at a time, of shards so short that no mean is ready before all contributions have come."""
    simulation = run(4, 0.5, ops=900, length=400_000, depth=1, buckets=1)
    assert max(epochs(simulation)) in (0, 2)
    last = simulation.reports(0)[-1]
    assert len({link.gather.coords for link in last.links}) <= 2  # equal up to the bucket's end


def test_a_port_that_heals_owns_its_share_again() -> None:
    changes = [RateChange(0.0, 3, 0.5, 0.5), RateChange(30.0, 3, 1.0, 1.0)]
    simulation = run(4, ops=1000, length=800_000, rate_changes=changes, budget=1e-9)  # nobody hurries
    assert epochs(simulation) == {0, 1, 2}
    coords = [link.gather.coords for link in simulation.reports(0)[-1].links]
    assert min(coords) > 0.9 * max(coords)


TAIL = Bursts(volume_bytes=2_000_000, gap_min_s=0.4, gap_mean_s=0.6)  # as in tail-3
LONG = Bursts(volume_bytes=20_000_000, gap_min_s=4.0, gap_mean_s=10.0)  # as in bursts


@pytest.mark.parametrize("bursts", [None, TAIL, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("ranks", "length"), [(4, 50_000), pytest.param(4, 800_000, marks=pytest.mark.long), (8, 400_000)]
)
def test_a_healthy_group_never_changes_owners(ranks: int, length: int, bursts: Bursts | None) -> None:
    for seed in range(2):
        jitter = np.random.default_rng(seed).normal(1, 0.1, (450, ranks))
        quiet = {"length": length, "compute_s": 0.02 * jitter, "seed": seed}
        simulation = run(ranks, ops=450, bursts=bursts, queue_bytes=24_000_000, **quiet)
        assert epochs(simulation) == {0}, f"seed {seed}"


@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_a_rank_that_computes_slowly_has_no_slow_port(factor: float) -> None:
    compute_s = np.full((450, 4), 0.03)
    compute_s[:, 3] *= factor
    simulation = run(4, ops=450, length=400_000, depth=1, buckets=1, compute_s=compute_s)
    assert epochs(simulation) == {0}
