"""Epochs (docs/epochs.md) in virtual time: who owns what after a death, what becomes of what is late, what
no schedule may do. The agreement alone is in test_policy_epochs.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tailcut import Freeze, Partition, Report, Scenario, Simulation, _native, simulate
from tailcut.simulation.run import spec_of
from tests.seeds import seeds
from tests.test_conservation import scenario_of

WITHIN_OPS = 20


def group(ranks: int, ops: int = 80, **more: Any) -> Scenario:
    values: dict[str, Any] = {
        "ranks": ranks,
        "ops": ops,
        "length": 10_000,
        "buckets": 2,
        "epochs": True,
        "steering": True,
        "delay_s": 5e-5,
        "bytes_per_s": 1e9,
        "compute_s": [[0.002] * ranks] * ops,
    }
    return Scenario(**{**values, **more})


def dead(rank: int, from_s: float = 0.02) -> Freeze:
    return Freeze(rank, from_s, None)


def catching_up(rank: int, ranks: int, ops: int) -> list[list[float]]:
    """Nobody waits for a rank that comes back: it is with the others again if it computes less."""
    return [[1e-4 if other == rank else 0.002 for other in range(ranks)]] * ops


def first_loss(reports: list[Report]) -> int:
    return next(report.seq for report in reports if report.lost_frac > 0)


def assert_whole_again(simulation: Simulation, alive: list[int], since: int | None = None) -> None:
    """Every share is back within 20 ops, and stays, with the mean of those that are alive."""
    for rank in alive:
        reports = simulation.reports(rank)
        lost = first_loss(reports) if since is None else since
        for report in reports[lost + WITHIN_OPS :]:
            assert report.lost_frac == 0, f"rank {rank}, op {report.seq}, lost from op {lost} on"
    last = simulation.scenario.ops - 1
    mean = np.mean([simulation.inputs[last][rank] for rank in alive], 0)
    for rank in alive:
        assert np.abs(simulation.results[last][rank] - mean).max() < 1e-3


# ---- how a bucket is cut -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 64, 65, 640, 1000, 99_999])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_equal_weights_cut_as_no_weights_do(length: int, ranks: int) -> None:
    for shard in range(ranks):
        plain = _native.shard_range(length, ranks, shard)
        for weight in (1, 5, 0xFFFF):
            assert _native.shard_range(length, ranks, shard, [weight] * ranks) == plain


@pytest.mark.parametrize("seed", range(50))
def test_weights_cut_the_whole_bucket_in_order_and_in_proportion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, length = int(rng.integers(1, 9)), int(rng.integers(0, 200_000))
    weights = rng.integers(0, 5, ranks)
    weights[rng.integers(ranks)] = 3
    ranges = [_native.shard_range(length, ranks, shard, weights.tolist()) for shard in range(ranks)]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == length
    for (begin, end), weight in zip(ranges, weights, strict=True):
        assert begin % 64 == 0 or begin == length
        assert (weight > 0) or begin == end
        assert end - begin <= length * weight / weights.sum() + 64 * ranks


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        _native.shard_range(100, 2, 0, [0, 0])
    with pytest.raises(ValueError, match="one for each rank"):
        _native.shard_range(100, 2, 0, [1])
    with pytest.raises(ValueError, match="not a rank"):
        _native.Epoch(1, 0, [1, 1], [2])


# ---- deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_dead_ranks_share_is_back_within_20_ops(ranks: int, codec: str) -> None:
    simulation = simulate(group(ranks, codec=codec, freezes=[dead(ranks - 1)]))
    assert_whole_again(simulation, list(range(ranks - 1)))
    assert {simulation.reports(rank)[-1].epoch for rank in range(ranks - 1)} == {1}


def test_rank_0_may_die_too() -> None:
    simulation = simulate(group(4, freezes=[dead(0)]))
    assert_whole_again(simulation, [1, 2, 3])


def test_two_deaths_one_after_the_other() -> None:
    simulation = simulate(group(4, ops=140, freezes=[dead(1, 0.02), dead(3, 0.25)]))
    reports = simulation.reports(0)
    second = next(r.seq for r in reports if r.epoch == 1 and r.lost_frac > 0)
    assert_whole_again(simulation, [0, 2], second)
    assert reports[-1].epoch == 2


def test_a_death_during_an_epoch_change() -> None:
    for seq in range(12, 30):  # around the vote, the decision and the first op
        simulation = simulate(group(8, ops=120, freezes=[dead(1, 0.02), dead(5, 0.0031 * seq)]))
        alive = [0, 2, 3, 4, 6, 7]
        last = max(first_loss(simulation.reports(0)), int(np.ceil(0.0031 * seq / 0.0021)))
        assert_whole_again(simulation, alive, last + WITHIN_OPS)


def test_a_rank_that_leaves_gives_its_share_back() -> None:
    simulation = simulate(group(4, ops_by_rank={2: 20}))
    assert_whole_again(simulation, [0, 1, 3])


def test_at_n_2_either_may_leave_but_only_the_lower_may_bury_the_other() -> None:
    left = simulate(group(2, ops_by_rank={0: 20}))
    assert_whole_again(left, [1])
    lower = simulate(group(2, freezes=[dead(1)]))
    assert lower.reports(0)[-1].lost_frac == 0
    higher = simulate(group(2, freezes=[dead(0)]))
    assert (higher.reports(1)[-1].epoch, higher.reports(1)[-1].lost_frac > 0) == (0, True)


def test_a_minority_forms_no_epoch_and_goes_on() -> None:
    cut = [Partition(0.02, 10.0, (3, 4))]
    simulation = simulate(group(5, partitions=cut))
    assert_whole_again(simulation, [0, 1, 2])
    for rank in (3, 4):  # they read the store, and follow the majority's epoch
        assert len(simulation.reports(rank)) == simulation.scenario.ops
    minority = simulate(group(5, partitions=cut, freezes=[dead(0), dead(1)]))
    assert {minority.reports(rank)[-1].epoch for rank in (2, 3, 4)} == {0}
    assert len(minority.reports(3)) == minority.scenario.ops


def test_of_two_halves_that_of_the_lowest_rank_goes_on() -> None:
    simulation = simulate(group(4, partitions=[Partition(0.02, 10.0, (0, 3))]))
    assert_whole_again(simulation, [0, 3])
    assert all(report.lost_frac > 0 for report in simulation.reports(1)[40:])


def test_without_a_store_training_goes_on_without_epochs() -> None:
    simulation = simulate(group(4, freezes=[dead(3)], store_until_s=0.03))
    reports = simulation.reports(0)
    assert len(reports) == simulation.scenario.ops
    assert (reports[-1].epoch, reports[-1].lost_frac > 0) == (0, True)


def test_who_was_only_frozen_comes_back_and_owns_again() -> None:
    freezes, compute_s = [Freeze(2, 0.02, 0.2)], catching_up(2, 4, 200)  # for more ops than the usual window
    simulation = simulate(group(4, ops=200, freezes=freezes, window_ops=256, compute_s=compute_s))
    epochs = [report.epoch for report in simulation.reports(0)]
    assert sorted(set(epochs)) == [0, 1, 2]
    assert [report.epoch for report in simulation.reports(2)][-1] == 2
    assert all(report.lost_frac == 0 for rank in range(4) for report in simulation.reports(rank)[-20:])
    last = simulation.scenario.ops - 1
    assert np.abs(simulation.results[last] - np.mean(simulation.inputs[last], 0)).max() < 1e-3


@pytest.mark.parametrize(
    ("ranks", "rows", "codec"),
    [(6, 2, "raw"), (6, 2, "planes"), (12, 3, "raw"), (16, 4, "planes"), (128, 8, "raw")],
)
def test_in_a_grid_the_dead_place_weighs_nothing_in_every_row(ranks: int, rows: int, codec: str) -> None:
    length = 8 * 64 * ranks // rows
    lost = ranks - 2
    simulation = simulate(group(ranks, rows=rows, length=length, codec=codec, freezes=[dead(lost)], ops=50))
    assert_whole_again(simulation, [rank for rank in range(ranks) if rank != lost], 8)


def test_in_a_grid_two_may_die_and_one_may_come_back() -> None:
    freezes = [dead(5), Freeze(3, 0.02, 0.35), dead(10, 0.6)]
    compute_s = catching_up(3, 16, 260)
    simulation = simulate(group(16, rows=4, ops=260, freezes=freezes, window_ops=256, compute_s=compute_s))
    alive = [rank for rank in range(16) if rank not in (5, 10)]
    assert_whole_again(simulation, alive, 220)
    assert len({simulation.reports(rank)[-1].epoch for rank in alive}) == 1
    assert simulation.reports(0)[-1].epoch == 4  # without 5, without 3, with 3 again, without 10


# ---- what no schedule may do -------------------------------------------------------------------------------

BATCH = 25


def schedule(seed: int) -> Scenario:
    """Deaths, freezes, slow ranks and a partition at random times, at random ranks."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 3, 4, 5, 8], p=[0.2, 0.25, 0.3, 0.2, 0.05]))
    freezes = []
    for rank in range(ranks):
        kind, from_s = rng.random(), float(rng.uniform(0.005, 0.15))
        if kind < 0.15:
            freezes.append(Freeze(rank, from_s, None))
        elif kind < 0.35:
            freezes.append(Freeze(rank, from_s, from_s + float(rng.uniform(0.001, 0.15))))
    partitions = []
    if rng.random() < 0.4:
        from_s = float(rng.uniform(0, 0.2))
        side = tuple(int(r) for r in rng.choice(ranks, int(rng.integers(1, ranks)), replace=False))
        partitions = [Partition(from_s, from_s + float(rng.uniform(0.01, 0.3)), side)]
    ops, rows = 70, 2 if ranks in (4, 8) and rng.random() < 0.3 else 1
    return group(
        ranks,
        ops=ops,
        length=int(rng.choice([64, 300, 1000])),
        freezes=freezes,
        partitions=partitions,
        depth=int(rng.integers(1, 3)),
        loss=float(rng.choice([0, 0, 0.02])),
        jitter_s=float(rng.choice([0, 2e-5])),
        multicast=bool(rng.random() < 0.2 and rows == 1),
        rows=rows,
        codec=str(rng.choice(["raw", "planes"])),
        late=str(rng.choice(["carry", "discard"])),
        compute_s=(rng.uniform(0.0015, 0.0025, (ops, ranks)) * rng.choice([1, 1, 1, 3], ranks)).tolist(),
        deadline_s=0.05,
        window_ops=256,
        record=True,
        seed=seed,
    )


@pytest.mark.parametrize("batch", seeds(4, of=40))
def test_every_op_ends_by_its_bound_in_one_epoch(batch: int) -> None:
    changes = 0
    for seed in range(BATCH * batch, BATCH * (batch + 1)):
        simulation = simulate(schedule(seed))
        frozen_s = {f.rank: (f.until_s or math.inf) - f.from_s for f in simulation.scenario.freezes}
        for rank in range(simulation.scenario.ranks):
            reports = simulation.reports(rank)
            for report in reports:
                assert report.elapsed_s <= 0.05 + frozen_s.get(rank, 0) + 1e-9, f"seed {seed}"
            changes += reports[-1].epoch if reports else 0
        assert_one_epoch(simulation, seed)
    assert changes > 0  # otherwise the batch has tested nothing


def assert_one_epoch(simulation: Simulation, seed: int) -> None:
    """All ranks that went by one epoch in an op, and have a mean of a granule, have the same."""
    scenario = simulation.scenario
    if (
        scenario.late == "carry" or scenario.codec != "raw"
    ):  # what is added later, and what rounding makes of it
        return
    by_epoch: dict[tuple[int, int], list[int]] = {}
    for rank in range(scenario.ranks):
        for report in simulation.reports(rank):
            by_epoch.setdefault((report.seq, report.epoch), []).append(rank)
    for (seq, epoch), ranks in by_epoch.items():
        values = np.array([simulation.results[seq][rank] for rank in ranks if seq < scenario.ops])
        for granule in values.T[::64]:
            assert len(set(granule[granule != 0])) <= 1, f"seed {seed}, op {seq}, epoch {epoch}"


# ---- what is late ------------------------------------------------------------------------------------------


def run_with_epochs(scenario: Scenario, live: int, epochs: list[_native.Epoch]) -> Simulation:
    """All ranks follow these epochs from their first report on. Nobody dies."""
    spec = spec_of(scenario)
    told: set[int] = set()

    def agree(rank: int, now_ns: int, report: _native.OpReport) -> list[_native.Epoch]:
        new = rank not in told
        told.add(rank)
        return epochs if new else []

    spec.agree = agree
    rng = np.random.default_rng(scenario.seed)
    inputs = [
        [
            rng.integers(-20, 20, scenario.length).astype(np.float32) * (op < live)
            for _ in range(scenario.ranks)
        ]
        for op in range(scenario.ops)
    ]
    results = [[bucket.copy() for bucket in op] for op in inputs]
    native = _native.simulate(spec, results)
    return Simulation(scenario, inputs, results, [], native.ended_at_ns / 1e9, native)


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("batch", seeds(3, of=10))
def test_what_is_late_is_handed_over_to_the_owners_of_the_next_epoch(batch: int, codec: str) -> None:
    handed = 0
    for seed in range(12 * batch, 12 * (batch + 1)):
        scenario, live = scenario_of(seed, codec=codec)
        rng = np.random.default_rng(seed)
        ranks = scenario.ranks
        epochs = []
        for number, first_seq in enumerate((4, max(5, live // 2), live), 1):
            weights = rng.integers(0, 3, ranks)
            weights[rng.integers(ranks)] = 2
            epochs.append(_native.Epoch(number, first_seq, weights.tolist(), list(range(ranks))))
        simulation = run_with_epochs(scenario, live, epochs)
        for bucket in range(scenario.buckets):
            means = np.sum([np.mean(op, 0) for op in simulation.inputs[bucket :: scenario.buckets]], 0)
            applied = np.sum(simulation.results[bucket :: scenario.buckets], 0, np.float64)
            assert np.abs(applied - means).max() < 0.01, f"seed {seed}"
        handed += sum(counters.carried_contributions for counters in simulation.native.counters)
    assert handed > 0
