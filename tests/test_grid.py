"""A group as a grid: rows and columns, with the loss semantics of a flat group (docs/grid.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.grid_wan import crossing_bytes
from tailcut import ConfigError, Scenario, _native, simulate
from tailcut.grid import GridLayout, grid_of, rows_for
from tailcut.simulation import Freeze, Simulation
from tests.groups import allreduce, open_groups, vectors
from tests.reports import silent
from tests.tables import rows

GRANULE = 64


def marked(ranks: int, length: int, ops: int) -> list[list[np.ndarray]]:
    """Rank r contributes 2**r everywhere: which ranks are in a mean can be read off it."""
    return [[np.full(length, 2.0**rank, np.float32) for rank in range(ranks)] for _ in range(ops)]


def contributors(mean: float, ranks: int) -> int:
    """As a set of bits; 0 if it is the mean of no set of ranks."""
    for count in range(1, ranks + 1):
        total = mean * count
        if abs(total - round(total)) < 1e-3 and round(total).bit_count() == count:
            return round(total)
    return 0


def check_like_a_flat_group(simulation: Simulation) -> None:
    """Every granule of every result is zero or the mean of some ranks' contributions, and all ranks that have
    it agree bit for bit."""
    ranks = simulation.scenario.ranks
    by_seq: dict[int, list[np.ndarray]] = {}
    for rank in range(ranks):
        for report in simulation.native.reports[rank]:
            by_seq.setdefault(report.seq, []).append(simulation.results[report.ticket][rank])
    for results in map(np.stack, by_seq.values()):
        for at in range(0, results.shape[1], GRANULE):
            part = results[:, at : at + GRANULE]
            held = part[part[:, 0] != 0]
            if len(held):
                assert np.all(held == held[0, 0])
                assert contributors(float(held[0, 0]), ranks), f"{held[0, 0]} is no mean of contributions"


def scenario(**fields: object) -> Scenario:
    given = {"ranks": 12, "rows": 3, "length": 12 * 8 * GRANULE, "ops": 4, "deadline_s": 0.2, "delay_s": 1e-4}
    return Scenario(**given | fields)


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 70_001])
@pytest.mark.parametrize("rows", [2, 3, 6])
def test_without_loss_all_ranks_have_the_same_exact_mean(codec: str, length: int, rows: int) -> None:
    simulation = simulate(scenario(rows=rows, length=length, codec=codec, ops=2))
    for inputs, results in zip(simulation.inputs, simulation.results, strict=True):
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
        exact = np.mean(inputs, axis=0, dtype=np.float64)
        np.testing.assert_allclose(results[0], exact, atol=1e-6 if codec == "raw" else 1e-3)
    assert all(r.status == "complete" for rank in range(12) for r in simulation.reports(rank))


def gain_and_nmse(result: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    error = result - exact
    return float(result @ exact / (exact @ exact)), float(error @ error / (exact @ exact))


@pytest.mark.parametrize("rows", [2, 3, 6])
@pytest.mark.parametrize("planes", [2, 4, 8, 11])
def test_planes_err_by_at_most_a_tenth_more_than_in_a_flat_group(planes: int, rows: int) -> None:
    """Sums travel between rows with more planes than contributions, and the mean is coded once."""

    def nmse(rows: int) -> float:
        simulation = simulate(scenario(rows=rows, length=12 << 15, codec="planes", planes=planes, ops=1))
        exact = np.mean(simulation.inputs[0], axis=0, dtype=np.float64)
        return gain_and_nmse(simulation.results[0][0], exact)[1]

    row_length = 12 // rows
    fewer_contributions_are_coded = (2 - 1 / row_length) / (2 - 1 / 12)
    assert nmse(rows) <= 1.12 * fewer_contributions_are_coded * nmse(1)


@pytest.mark.parametrize(
    "faults",
    [
        {"planes": 2},
        {"planes": 4},
        {"planes": 4, "trim": 0.5},
        {"planes": 16, "trim": 0.5},
        {"planes": 6, "loss": 0.05, "resend": False},
    ],
    ids=lambda faults: ",".join(f"{k}={v}" for k, v in faults.items()),
)
def test_planes_are_unbiased_whatever_is_cut_or_lost(faults: dict) -> None:
    """Over seeds, which change rotation and fates: the gain on the true mean is 1."""
    random, length = np.random.default_rng(5), 6 * 2048
    shared = random.standard_normal(length)
    inputs = [(shared + random.standard_normal(length)).astype(np.float32) for _ in range(6)]
    exact = np.mean(inputs, axis=0, dtype=np.float64)
    gains = []
    for seed in range(40):
        given = scenario(ranks=6, rows=2, length=length, seed=seed, ops=1, codec="planes", deadline_s=0.01)
        simulation = simulate(replace(given, **faults), [inputs])
        gains.append(np.mean([gain_and_nmse(result, exact)[0] for result in simulation.results[0]]))
    assert np.mean(gains) == pytest.approx(1, abs=0.006 + 3 * np.std(gains) / np.sqrt(len(gains)))


@pytest.mark.parametrize("seed", range(20))
def test_planes_are_the_same_bits_for_all_who_have_everything(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = scenario(
        seed=seed,
        length=int(rng.choice([5000, 70_001, 300_000])),
        codec="planes",
        planes=int(rng.choice([1, 3, 8, 16])),
        planes_by_rank={int(rng.integers(12)): 5},
        rows=int(rng.choice([2, 3, 4])),
        loss=float(rng.choice([0.0, 0.02])),
        resend=bool(rng.integers(2)),
        compute_s=rng.exponential(rng.choice([0.0, 0.02]), (4, 12)).tolist(),
        steering=bool(rng.integers(2)),
    )
    simulation = simulate(given)
    for op, results in enumerate(simulation.results):
        whole = [r for r in range(12) if simulation.reports(r)[op].lost_frac == 0]
        assert len({results[r].tobytes() for r in whole}) <= 1


def test_planes_of_a_row_that_lost_a_rank_weigh_less() -> None:
    """Rank 4 is in no mean; of the shard of which it would own a part the other row has the rest only."""
    given = scenario(rows=2, ops=1, length=6 << 15, codec="planes", freezes=[Freeze(4, 0.0, None)])
    simulation = simulate(given)
    others = np.array([x for r, x in enumerate(simulation.inputs[0]) if r != 4], np.float64)
    exact = others.mean(axis=0)
    for shard in range(6):
        begin, end = _native.shard_range(given.length, 6, shard)
        _, nmse = gain_and_nmse(simulation.results[0][7][begin:end], exact[begin:end])
        assert (nmse < 1e-7) == (_native.owner_of(shard, 0, 6, given.seed) != 4)


def test_zeros_stay_zeros() -> None:
    given = scenario(codec="planes", planes=3, ops=1)
    simulation = simulate(given, [[np.zeros(given.length, np.float32)] * 12])
    assert all(report.status == "complete" for rank in range(12) for report in simulation.reports(rank))
    assert not any(result.any() for result in simulation.results[0])


@pytest.mark.parametrize("planes", [4, 9, 16])
@pytest.mark.parametrize("faults", [{}, {"loss": 0.02}, {"freezes": [Freeze(5, 0.01, 0.05)]}], ids=str)
def test_planes_without_values_have_the_same_history(planes: int, faults: dict) -> None:
    given = scenario(codec="planes", planes=planes, length=12 << 15, record=True, packet_bytes=1424, **faults)
    real, elided = (simulate(replace(given, elided=elided)).native for elided in (False, True))
    assert np.array_equal(real.deliveries(), elided.deliveries())


@pytest.mark.parametrize("seed", range(40))
def test_under_faults_a_mean_is_that_of_those_who_came_and_the_same_for_all_who_have_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    faults = {
        "loss": rng.choice([0.0, 0.02, 0.2]),
        "duplicate": rng.choice([0.0, 0.1]),
        "corrupt": rng.choice([0.0, 0.01]),
        "jitter_s": rng.choice([0.0, 2e-4]),
        "resend": bool(rng.integers(2)),
        "depth": int(rng.integers(1, 4)),
        "steering": bool(rng.integers(2)),
    }
    if rng.integers(2):
        until = rng.choice([None, 0.05])
        faults["freezes"] = [Freeze(int(rng.integers(12)), float(rng.uniform(0, 0.01)), until)]
    compute_s = rng.exponential(rng.choice([0.0, 0.02]), (4, 12)).tolist()
    given = scenario(
        seed=seed, compute_s=compute_s, packet_bytes=512, rows=int(rng.choice([2, 3, 4])), **faults
    )
    simulation = simulate(given, marked(12, given.length, given.ops))
    check_like_a_flat_group(simulation)
    for rank in range(12):
        for report in simulation.reports(rank):
            assert report.elapsed_s <= given.deadline_s + 1e-6 or faults.get("freezes")


def test_a_row_that_lost_a_rank_weighs_less() -> None:
    """Counts, not N: 5 of 6 in one row, 6 of 6 in the other."""
    given = scenario(rows=2, ops=3, freezes=[Freeze(4, 0.0, None)])
    simulation = simulate(given, marked(12, given.length, given.ops))
    all_but_4 = sum(2.0**rank for rank in range(12) if rank != 4) / 11
    other_row = simulation.results[0][7]
    assert np.mean(other_row == np.float32(all_but_4)) >= 5 / 6 - 1 / 12


def test_a_dead_rank_costs_its_own_row_a_shard_and_the_others_its_part_of_it() -> None:
    given = scenario(rows=3, ops=6, freezes=[Freeze(5, 0.0, None)])
    simulation = simulate(given, marked(12, given.length, given.ops))
    for rank in (4, 6, 7):
        assert np.mean(simulation.results[-1][rank] == 0) == pytest.approx(1 / 4)
    for rank in (0, 11):
        assert np.mean(simulation.results[-1][rank] == 0) == pytest.approx(1 / 12)
        assert simulation.reports(rank)[-1].lost_frac == pytest.approx(1 / 12)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_non_finite_gradient_reaches_every_row(codec: str) -> None:
    given = scenario(ops=1, codec=codec)
    inputs = marked(12, given.length, 1)
    inputs[0][7][333] = np.inf
    simulation = simulate(given, inputs)
    for rank in range(12):
        assert simulation.reports(rank)[0].non_finite
        assert not np.all(np.isfinite(simulation.results[0][rank]))


def test_a_rank_sends_to_its_row_and_its_column_only() -> None:
    simulation = simulate(scenario(record=True, ops=1))
    peers = {(packet.source, packet.destination) for packet in rows(simulation.native.deliveries())}
    grid = GridLayout(simulation.scenario.ranks, simulation.scenario.rows)
    for rank in range(12):
        allowed = {*grid.row(rank), *grid.column(rank)} - {rank}
        assert {to for source, to in peers if source == rank} == allowed


def test_reports_name_ranks_of_the_whole_group() -> None:
    simulation = simulate(scenario(ops=6, freezes=[Freeze(5, 0.0, None)]))
    report = simulation.reports(6)[-1]
    assert silent(report) == (5,)
    assert list(report.members) == [4, 5, 6, 7]
    assert 5 in report.missing_from
    (column,) = simulation.reports(9)[-1].column
    assert silent(column) == (5,)
    assert list(column.members) == [1, 5, 9]


def test_a_rank_far_behind_jumps_with_its_column() -> None:
    freezes = [Freeze(5, 0.0, 0.5)]
    compute_s = [[0.02] * 12] * 40
    given = scenario(
        ops=40, window_ops=4, freezes=freezes, resync_before={5: 30}, deadline_s=0.05, compute_s=compute_s
    )
    simulation = simulate(given, marked(12, given.length, given.ops))
    assert any(report.behind_ops for report in simulation.reports(5))
    check_like_a_flat_group(simulation)


def test_goodbyes_reach_the_column_after_its_last_op() -> None:
    simulation = simulate(scenario(ops=3, ops_by_rank={5: 2}))
    assert simulation.native.closed_at_ns[0] < 50e6  # nobody lingers until the deadline
    assert [report.status for report in simulation.reports(0)] == ["complete"] * 3


def test_elided_ops_take_as_long_as_real_ones() -> None:
    fields = {"bytes_per_s": 25e6, "paced": True, "steering": True, "length": 1 << 16, "deadline_s": 1.0}
    for codec in ("raw", "planes"):
        real, elided = (simulate(scenario(codec=codec, elided=e, **fields)) for e in (False, True))
        times = [[r.elapsed_s for rank in range(12) for r in s.reports(rank)] for s in (real, elided)]
        assert times[0] == times[1]


@pytest.mark.parametrize(("ranks", "planes"), [(4, 4), (4, 8), (4, 16), (8, 4)])
def test_a_row_for_each_site_sends_little_more_than_a_share_of_what_a_flat_group_sends(
    ranks: int, planes: int
) -> None:
    """Between the sites go the contributions and means of one rank of each site, and not of all of them. Sums
    have one plane more."""
    flat, grid = (crossing_bytes(ranks=ranks, rows=rows, planes=planes, length=1 << 20) for rows in (1, 2))
    more_planes = (min(planes + 1, 16) + planes) / (2 * planes)
    assert grid / flat == pytest.approx(more_planes / (ranks // 2), rel=0.02)


def test_large_groups_become_square_grids() -> None:
    assert [rows_for(n) for n in (2, 8, 127, 128, 144, 1000, 1024)] == [1, 1, 1, 8, 12, 25, 32]
    assert rows_for(131) == 1  # a prime
    assert grid_of(144, 0, "auto").rows == 1  # multicast is flat
    assert GridLayout(1024, 32).senders == 63


def test_a_grid_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="must divide"):
        grid_of(10, 3)
    with pytest.raises(ConfigError, match="multicast"):
        grid_of(12, 3, "on")
    with pytest.raises(ConfigError, match="one rank in a row"):
        grid_of(12, 12)


def test_a_grid_over_sockets(tmp_path: Path) -> None:
    with open_groups(tmp_path, 6, rows=2, deadline_s=20.0) as groups:
        assert "2 rows of 3 ranks" in groups[0].describe()
        for op in range(3):
            arrays = vectors(6, 100_000, seed=op)
            exact = np.mean(arrays, axis=0, dtype=np.float64)
            assert [report.status for report in allreduce(groups, arrays)] == ["complete"] * 6
            for array in arrays[1:]:
                np.testing.assert_array_equal(array, arrays[0])
            np.testing.assert_allclose(arrays[0], exact, atol=1e-6)
        assert len(groups[0].stats().verdicts) == 6
