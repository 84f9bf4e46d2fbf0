"""Rule 9 to the last bit, and clause by clause: what replicas apply adds up to the means of all.

Values are integers that every mean of up to N contributions keeps exact, and N is a power of two, so that a
sum over ops that lacks or repeats anything differs. Ops of zeros follow until nothing is pending.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tailcut import Freeze, Scenario, Simulation, _native, simulate
from tests.seeds import seeds

BATCH = 20
ZEROS = 24
"""Rounds of all buckets with zeros at the end."""


def scenario_of(seed: int, **more: Any) -> tuple[Scenario, int]:
    """A schedule of delay, freezes, reordering, duplication and loss, and how many of its ops have values."""
    rng = np.random.default_rng(seed)
    ranks, buckets = int(rng.choice([2, 4, 8])), int(rng.integers(1, 4))
    live = buckets * int(rng.integers(3, 10))
    ops = live + buckets * ZEROS
    late_s = 0.08 if rng.random() < 0.5 else 1e-4
    # Links that are always busy would leave no time for what is late.
    leisurely = np.random.default_rng(seed).uniform(0.05, 0.051, (ops - live, ranks))
    freezes = []
    for rank in range(ranks):
        if rng.random() < 0.2:
            from_s = float(rng.uniform(0, 0.3))
            freezes.append(Freeze(rank, from_s, from_s + float(rng.uniform(0.001, 0.3))))
    values: dict[str, Any] = {
        "ranks": ranks,
        "buckets": buckets,
        "depth": int(rng.integers(1, buckets + 1)),
        "ops": ops,
        "length": int(rng.choice([64, 65, 1000, 5000])),
        "compute_s": np.concatenate([rng.uniform(0, late_s, (live, ranks)), leisurely]).tolist(),
        "loss": float(rng.choice([0, 0, 0.01, 0.1, 0.3])),
        "duplicate": float(rng.choice([0, 0.1])),
        "delay_s": float(rng.choice([1e-6, 5e-5, 2e-3])),
        "jitter_s": float(rng.choice([0, 1e-5, 1e-3])),
        "bytes_per_s": float(rng.choice([0, 2e6, 2e7])),
        "packet_bytes": int(rng.choice([256, 1280, 8704])),
        "multicast": bool(rng.random() < 0.3),
        "paced": bool(rng.random() < 0.3),
        "window_ops": 256,
        "freezes": freezes,
        "seed": seed,
    }
    if values["paced"]:  # with a third lost, the pace is too slow for everything to come in time
        values["loss"] = min(values["loss"], 0.1)
    return Scenario(**{**values, **more}), live


def run(scenario: Scenario, live: int) -> Simulation:
    rng = np.random.default_rng(scenario.seed)
    unit = math.lcm(*range(1, scenario.ranks + 1), scenario.ranks)

    def bucket(op: int) -> np.ndarray:
        if op >= live:
            return np.zeros(scenario.length, np.float32)
        return (rng.integers(-20, 20, scenario.length) * unit).astype(np.float32)

    return simulate(scenario, [[bucket(op) for _ in range(scenario.ranks)] for op in range(scenario.ops)])


def sums(simulation: Simulation, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the means of all contributions to a bucket, and by rank of the results."""
    every = simulation.scenario.buckets
    means = np.sum([np.mean(op, 0, np.float64) for op in simulation.inputs[bucket::every]], 0)
    return means, np.asarray(np.sum(simulation.results[bucket::every], 0, np.float64))


@pytest.mark.parametrize("batch", seeds(15, of=50))
def test_nothing_is_lost_and_nothing_counts_twice(batch: int) -> None:
    late = 0
    for seed in range(BATCH * batch, BATCH * (batch + 1)):
        scenario, live = scenario_of(seed)
        simulation = run(scenario, live)
        for bucket in range(scenario.buckets):
            means, applied = sums(simulation, bucket)
            assert all(np.array_equal(of_rank, means) for of_rank in applied), f"seed {seed}"
        late += sum(c.carried_contributions + c.carried_means for c in simulation.native.counters)
    assert late > 0  # otherwise the batch has tested nothing


@pytest.mark.parametrize("seed", seeds(15, of=40))
def test_with_planes_what_is_missing_is_the_error_of_the_code(seed: int) -> None:
    scenario, live = scenario_of(seed, codec="planes")
    simulation = run(scenario, live)
    for bucket in range(scenario.buckets):
        means, applied = sums(simulation, bucket)
        assert np.square(applied - means).sum(1).max() <= 1e-6 * np.square(means).sum()


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("seed", seeds(8, of=20))
def test_replicas_are_equal_in_the_end_though_means_are_trimmed(codec: str, seed: int) -> None:
    trim_bytes = 256 if codec == "planes" else 0
    fast = {"bytes_per_s": 0.0, "freezes": ()}  # nothing gets too late to be finished
    scenario, live = scenario_of(seed, codec=codec, trim=0.3, trim_bytes=trim_bytes, **fast)
    simulation = run(scenario, live)
    for bucket in range(scenario.buckets):
        means, applied = sums(simulation, bucket)
        assert np.abs(applied - applied[0]).max() <= 1e-5 * np.abs(means).max() + 1e-3


# ---- clause by clause --------------------------------------------------------------------------------------


def late_rank(late_s: float = 0.06, **more: Any) -> Simulation:
    """Four ranks, of which one enters op 0 after the others have closed it."""
    compute = [[0.0, 0.0, 0.0, late_s]] + [[0.07] * 4] * 3
    values: dict[str, Any] = {"ranks": 4, "length": 1024, "ops": 4, "buckets": 1, "compute_s": compute}
    scenario = Scenario(**{**values, **more})
    inputs = [[np.full(1024, 12.0 * rank * (op == 0), np.float32) for rank in range(4)] for op in range(4)]
    return simulate(scenario, inputs)


def test_a_late_contribution_enters_the_next_mean_with_weight_one_over_n() -> None:
    simulation = late_rank()
    owned = [_native.owner_of(shard, 0, 4, 0, 1) for shard in range(4)]
    for shard, owner in enumerate(owned):
        begin, _ = _native.shard_range(1024, 4, shard)
        first, second = (simulation.results[op][0][begin] for op in (0, 1))
        mean = np.mean([12.0 * rank for rank in range(3)])  # u₀, over those who were on time
        assert first == mean
        assert second == (36.0 - mean) / 4, owner  # E/N, also of the late rank's own shard


def test_discarded_means_nothing_follows() -> None:
    simulation = late_rank(late="discard")
    assert not any(simulation.results[op][0].any() for op in (1, 2, 3))
    assert sum(c.carried_contributions for c in simulation.native.counters) == 0


def test_a_bucket_without_a_key_is_not_carried() -> None:
    simulation = late_rank(buckets=0)
    assert not any(simulation.results[op][0].any() for op in (1, 2, 3))


def test_what_is_late_enters_its_own_bucket_and_no_other() -> None:
    simulation = late_rank(buckets=2)
    assert not simulation.results[1][0].any()
    assert simulation.results[2][0].all()


def test_a_bucket_that_changes_its_length_drops_what_was_late() -> None:
    lengths = {(1, rank): 512 for rank in range(4)}
    scenario = Scenario(
        ranks=4, length=1024, ops=2, buckets=1, lengths=lengths, compute_s=[[0, 0, 0, 0.06], [0.07] * 4]
    )
    inputs = [
        [np.full(scenario.length_of(op, rank), 1.0 - op, np.float32) for rank in range(4)] for op in (0, 1)
    ]
    simulation = simulate(scenario, inputs)
    assert not any(simulation.results[1][rank].any() for rank in range(4))
    assert sum(c.dropped_late_coords for c in simulation.native.counters) > 0


def test_a_late_contribution_that_is_not_finite_is_not_carried() -> None:
    scenario = Scenario(
        ranks=4, length=1024, ops=3, buckets=1, compute_s=[[0, 0, 0, 0.06]] + [[0.07] * 4] * 2
    )
    inputs = [[np.ones(1024, np.float32) for _ in range(4)] for _ in range(3)]
    inputs[0][3][:] = np.inf
    simulation = simulate(scenario, inputs)
    for rank in range(4):
        assert [report.non_finite for report in simulation.reports(rank)] == [False] * 3
        assert all(np.isfinite(simulation.results[op][rank]).all() for op in range(3))


def test_the_same_seed_gives_the_same_bits() -> None:
    scenario, live = scenario_of(7)
    first, second = run(scenario, live), run(scenario, live)
    assert np.array_equal(first.results, second.results)
