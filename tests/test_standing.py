"""Standings: who is late, slow, stuck or dead, since when, and what it has cost. In virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailcut import Freeze, Scenario, Simulation, Standing, Stats, simulate
from tailcut.grid import GridLayout
from tailcut.policy.grid import GridSteering
from tailcut.simulation.scenario import Hang

COMPUTE_S = 0.1
OPS = 120


def watched(**more: Any) -> tuple[list[GridSteering], Simulation]:
    pilots = [GridSteering(rank=rank, grid=GridLayout(4, 1), deadline_s=10.0, planes=16) for rank in range(4)]
    compute_s = more.pop("compute_s", np.full((OPS, 4), COMPUTE_S))
    scenario = Scenario(
        ranks=4,
        length=20_000,
        ops=OPS,
        deadline_s=10.0,
        buckets=1,
        compute_s=compute_s,
        bytes_per_s=1e8,
        elided=True,
        window_ops=1024,
        **more,
    )
    return pilots, simulate(scenario, policies=pilots)


def test_a_healthy_run_names_nobody() -> None:
    """Ranks enter apart by a fifth of a step, which is many times longer than an op takes."""
    jitter = np.random.default_rng(1).uniform(0.9, 1.1, (OPS, 4))
    pilots, _ = watched(compute_s=COMPUTE_S * jitter)
    for pilot in pilots:
        assert {standing.name for standing in pilot.standings} == {"on time"}
        assert all(standing.unused_ops <= 0.03 * OPS for standing in pilot.standings)
        assert all(counts["on time"] >= 0.97 * OPS for counts in pilot.verdicts)


def test_a_stuck_rank_is_named_with_the_op_and_its_cost() -> None:
    pilots, _ = watched(hangs=[Hang(3, 5.0, 1e6)])
    standing = pilots[0].standings[3]
    assert standing.name == "stuck"
    assert standing.since_op is not None
    assert 40 < standing.since_op < 60
    assert standing.for_s > 5.0
    assert standing.unused_ops > 60
    assert 0.015 < standing.waited_s < 0.1  # two ops waited for it
    assert [other.name for other in pilots[0].standings[:3]] == ["on time"] * 3


def test_a_dead_rank_is_named() -> None:
    pilots, _ = watched(freezes=[Freeze(3, 5.0, None)])
    assert {pilot.standings[3].name for pilot in pilots[:3]} == {"dead"}


def test_a_rank_that_comes_back_is_on_time_again_and_that_is_counted() -> None:
    pilots, _ = watched(
        compute_s=np.tile([COMPUTE_S, COMPUTE_S, COMPUTE_S, 0.001], (OPS, 1)), hangs=[Hang(3, 5.0, 8.0)]
    )
    standing = pilots[0].standings[3]
    assert (standing.name, standing.since_op, standing.returns) == ("on time", None, 1)
    assert standing.unused_ops >= 20


def test_a_rank_that_begins_to_compute_twice_as_long_is_slow() -> None:
    compute_s = np.full((OPS, 4), COMPUTE_S)
    compute_s[40:, 3] *= 2
    pilots, _ = watched(compute_s=compute_s)
    assert pilots[0].standings[3].name == "slow"


def test_the_line_at_the_end_says_it() -> None:
    stats = Stats(
        ops=100,
        verdicts=({"on time": 100}, {"on time": 60, "compute-late": 40}),
        standings=(Standing(), Standing("stuck", 60, 4.0, 40, 0.1, 1)),
    )
    assert (
        "rank 1: compute-late in 40 ops (stuck since op 60 (4 s), back 1 time, "
        "40 ops without its contribution, 0.1 s waited for it)"
    ) in str(stats)
    assert "rank 0" not in str(stats)
