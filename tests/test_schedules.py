"""Seeded fault schedules on the simulated network, each held to the oracle.

A failing one alone: pytest "tests/test_schedules.py::test_fault_schedule[seed-17]"
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tailcut import Freeze, Partition, Scenario, simulate
from tests import oracle
from tests.seeds import seeds

LENGTHS = (0, 1, 63, 64, 65, 127, 129, 5000, 20_011)


def schedule(seed: int) -> Scenario:
    """Ranks x lengths run through all pairs; which faults act, and how strongly, is drawn."""
    random = np.random.default_rng(seed)
    ranks = (1, 2, 3, 5, 8)[seed % 5]
    length = LENGTHS[seed // 5 % len(LENGTHS)]
    ops = int(random.integers(1, 5))
    deadline_s = 0.1

    def sometimes(probability: float, value: float) -> float:
        return value if random.random() < probability else 0.0

    freezes, partitions = [], []
    for rank in range(ranks):
        fate = random.random()
        start_s = float(random.uniform(0, 0.1))
        if fate < 0.06:
            freezes.append(Freeze(rank, start_s, start_s + float(random.uniform(0.001, 0.3))))
        elif fate < 0.09:
            freezes.append(Freeze(rank, start_s, None))
    if random.random() < 0.15:
        start_s = float(random.uniform(0, 0.1))
        side = tuple(rank for rank in range(ranks) if random.random() < 0.5)
        partitions.append(Partition(start_s, start_s + float(random.uniform(0.01, 0.2)), side))
    late = sometimes(0.4, float(random.uniform(0.0, 0.12)))
    return Scenario(
        ranks=ranks,
        length=length,
        ops=ops,
        seed=seed,
        deadline_s=deadline_s,
        depth=int(random.integers(1, 4)),
        compute_s=random.uniform(0, 1e-4 + late, (ops, ranks)).tolist(),
        loss=sometimes(0.5, float(random.choice([0.001, 0.01, 0.1, 0.3]))),
        duplicate=sometimes(0.3, 0.1),
        corrupt=sometimes(0.3, 0.05),
        trim=sometimes(0.2, 0.2),
        delay_s=float(random.choice([1e-6, 5e-5, 2e-3])),
        jitter_s=sometimes(0.5, float(random.choice([1e-5, 1e-3]))),
        bytes_per_s=sometimes(0.4, float(random.choice([2e6, 2e7, 1e9]))),
        queue_bytes=int(sometimes(0.5, float(random.choice([8000, 60_000])))),
        freezes=freezes,
        partitions=partitions,
        pool_bytes=int(random.choice([1 << 16, 1 << 20, 1 << 24])),
        socket_buffer_bytes=int(random.choice([1 << 15, 1 << 20])),
        packet_bytes=int(random.choice([256, 1280, 8704])),
        multicast=seed % 7 < 3,
        deaf=(0,) if seed % 7 == 0 else (),
        paced=seed % 7 == 1,
        record=True,
    )


@pytest.mark.parametrize("seed", seeds(400, of=1200), ids=lambda seed: f"seed-{seed}")
def test_fault_schedule(seed: int) -> None:
    simulation = simulate(schedule(seed))
    oracle.check_deadlines(simulation)
    oracle.check(simulation)


@pytest.mark.parametrize("seed", seeds(130, of=400), ids=lambda seed: f"seed-{seed}")
def test_fault_schedule_with_planes(seed: int) -> None:
    raw = schedule(seed)
    # Longer than raw's, so that there are whole blocks, several stripes and many packets of one.
    length = 40 * raw.length if seed % 4 == 0 else raw.length
    simulation = simulate(dataclasses.replace(raw, codec="planes", length=length, trim_bytes=256))
    oracle.check_deadlines(simulation)
    oracle.check(simulation)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("multicast", [False, True])
def test_without_faults_all_ranks_hold_the_rank_order_mean_bit_for_bit(
    ranks: int, length: int, multicast: bool
) -> None:
    simulation = simulate(
        Scenario(ranks=ranks, length=length, ops=3, depth=2, jitter_s=1e-4, seed=length, multicast=multicast)
    )
    for inputs, results in zip(simulation.inputs, simulation.results, strict=True):
        expected = oracle.rank_order_mean(inputs).tobytes()
        assert all(result.tobytes() == expected for result in results)
    assert all(r.status == "complete" for rank in range(ranks) for r in simulation.reports(rank))


def test_256_ranks_in_one_process() -> None:
    simulation = simulate(Scenario(ranks=256, length=256 * 64, ops=2, jitter_s=1e-4))
    for inputs, results in zip(simulation.inputs, simulation.results, strict=True):
        expected = oracle.rank_order_mean(inputs).tobytes()
        assert all(result.tobytes() == expected for result in results)


def test_the_same_seed_gives_the_same_history() -> None:
    scenario = schedule(77)
    first, second = simulate(scenario), simulate(scenario)
    assert np.array_equal(first.native.deliveries(), second.native.deliveries())
    assert first.outcomes == second.outcomes
