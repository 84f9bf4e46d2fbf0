"""What happens when ops cost more than the budget, and the learning rate that goes with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tailcut import BudgetExceeded, Config, ConfigError, FileStore, Group, Scenario, Stats, _native, simulate
from tailcut.epsilon import Epsilon
from tailcut.grid import GridLayout
from tailcut.mirror import LR_PERIOD_OPS, LrScale, StageReport
from tailcut.policy.budget import LEAST_OPS, PERSISTENT_OPS, LrOffer, Spending
from tailcut.policy.deadline import fixed_bounds
from tailcut.policy.grid import GridSteering
from tailcut.report import Report
from tests.groups import allreduce, open_groups, vectors
from tests.reports import links, lost


def op(seq: int = 0, length: int = 1000, lost: float = 0.0, **fields) -> Report:
    given = {"status": "complete", "elapsed_s": 0.1, "epsilon": Epsilon(lost=lost), "links": links(4)}
    stages = {"scatter": StageReport(began_s=0.0, ended_s=0.0), "gather": StageReport(0, "all", 0.0, 0.1)}
    return Report(**{"seq": seq, "length": length, **given, **stages, **fields})


def steering(**fields) -> GridSteering:
    return GridSteering(**{"rank": 0, "grid": GridLayout(4), "deadline_s": 10.0, "planes": 4, **fields})


# ---- what was spent --------------------------------------------------------------------------------------
def test_the_total_is_the_mean_over_ops_by_their_length() -> None:
    spending = Spending(0.05)
    spending.after(op(length=3000, lost=0.01))
    spending.after(op(length=1000, lost=0.05))
    assert spending.total == Epsilon(lost=pytest.approx(0.02))


def test_one_bad_op_is_no_excess_and_many_are() -> None:
    spending = Spending(0.05)
    for _ in range(LEAST_OPS):
        spending.after(op(lost=0.01))
    spending.after(op(lost=0.5))
    assert not spending.over
    for _ in range(20):
        spending.after(op(lost=0.1))
    assert spending.over
    assert not spending.persistent
    for _ in range(PERSISTENT_OPS):
        spending.after(op(lost=0.1))
    assert spending.persistent
    for _ in range(100):
        spending.after(op())
    assert not spending.over
    assert not spending.persistent


def test_ops_that_say_nothing_of_errors_are_left_out() -> None:
    spending = Spending(0.05)
    spending.after(op(lost=1.0, non_finite=True))
    spending.after(op(lost=1.0, status="behind"))
    assert spending.total == Epsilon()


# ---- over budget -----------------------------------------------------------------------------------------
def over(pilot: GridSteering, ops: int = 40) -> GridSteering:
    for seq in range(ops):
        pilot.after(op(seq, lost=0.2), 0.1 * seq)
    return pilot


def test_wait_makes_bounds_as_long_as_the_deadline_allows_until_it_is_better() -> None:
    longest = fixed_bounds(10.0)
    for mode in ("proceed", "wait"):
        pilot = over(steering(over_budget=mode))
        assert (pilot.terms(1000).bounds.scatter_ns == longest.scatter_ns) == (mode == "wait")
    for seq in range(100):
        pilot.after(op(40 + seq), 4.0 + 0.1 * seq)
    assert pilot.terms(1000).bounds.scatter_ns < longest.scatter_ns


def late_rank(over_budget: str, buckets: int = 0) -> tuple[list[np.ndarray], list[Report]]:
    """Rank 3 enters long after SCATTER is cut; the second of two ops."""
    ops, ranks = 2, 4
    compute_s = np.zeros((ops, ranks))
    compute_s[1, 3] = 0.06
    scenario = Scenario(
        ranks=ranks, length=1 << 14, ops=ops, codec="planes", compute_s=compute_s, buckets=buckets
    )
    pilots = [
        steering(rank=rank, deadline_s=0.04, over_budget=over_budget, adaptive=False, planes=16)
        for rank in range(ranks)
    ]
    simulation = simulate(dataclasses.replace(scenario, deadline_s=0.04), policies=pilots)
    return simulation.results[1], [simulation.reports(rank)[1] for rank in range(3)]


@pytest.mark.parametrize("buckets", [0, 1], ids=["no key", "a key"])
def test_skip_gives_a_zero_gradient_where_owners_lack_more_than_the_budget(buckets: int) -> None:
    """With a key too it is lost, and not late: nothing of a skipped op is carried."""
    results, reports = late_rank("proceed", buckets)
    assert all(np.count_nonzero(result) > 0.7 * result.size for result in results[:3])
    results, reports = late_rank("skip", buckets)
    assert not any(np.any(result) for result in results[:3])
    assert all(report.lost_frac == 1.0 for report in reports)
    assert all(report.epsilon.lost == pytest.approx(1.0) for report in reports)
    assert all(lost(report, "scatter") == (0, 0, 0, 1) for report in reports)  # and nobody else is blamed


def test_skip_is_refused_where_a_rows_sum_stands_for_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over_budget='skip' is for groups without rows"):
        Group(0, 4, FileStore(tmp_path), Config(rows=2, over_budget="skip"))


def test_raise_ends_wait_with_an_error_that_says_what_it_was(tmp_path: Path) -> None:
    """One plane costs more than 5 %, whatever the network does."""
    with open_groups(tmp_path, 2, codec="planes", planes=1, over_budget="raise") as groups:
        for seq in range(LEAST_OPS - 1):
            allreduce(groups, vectors(2, 5000, seq))
        with pytest.raises(BudgetExceeded, match=r"ε = .*quantized.* and the budget is 5.0%"):
            allreduce(groups, vectors(2, 5000))


def test_a_hook_hears_of_an_excess_that_lasts_once(tmp_path: Path) -> None:
    heard: list[Stats] = []
    with open_groups(tmp_path, 2, codec="planes", planes=1) as groups:
        groups[0]._on_over_budget = heard.append
        for seq in range(LEAST_OPS + PERSISTENT_OPS + 20):
            allreduce(groups, vectors(2, 1000, seq))
    (stats,) = heard
    assert stats.recent_epsilon.total > stats.budget


def test_stats_say_what_was_spent(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, codec="planes", planes=4) as groups:
        reports = [allreduce(groups, vectors(2, 50_000, seq))[0] for seq in range(3)]
        stats = groups[0].stats()
    assert stats.epsilon.total == pytest.approx(np.mean([report.epsilon.total for report in reports]))
    assert f"this run spent {stats.epsilon.total:.1%} of its 5.0%" in str(stats)


# ---- the learning rate -----------------------------------------------------------------------------------
class Watched(GridSteering):
    def __init__(self, rank: int, grid: GridLayout) -> None:
        super().__init__(rank=rank, grid=grid, deadline_s=1.0, planes=2)
        self.scales: dict[int, float] = {}

    def after(self, report: Report, now_s: float) -> Report:
        judged = super().after(report, now_s)
        self.scales[report.seq] = self.lr_scale
        return judged


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_all_ranks_change_the_learning_rate_after_the_same_op(rows: int, loss: float) -> None:
    grid = GridLayout(4, rows)
    ops = 4 * LR_PERIOD_OPS
    scenario = Scenario(ranks=4, rows=rows, length=4096, ops=ops, codec="planes", loss=loss, deadline_s=1.0)
    if rows == 1:  # rank 2 is late where the factor changes: the others are ahead of it
        compute_s = np.full((ops, 4), 0.01)
        compute_s[2 * LR_PERIOD_OPS - 1 :, 2] = 0.001  # it catches up
        compute_s[2 * LR_PERIOD_OPS - 1 : 2 * LR_PERIOD_OPS + 3, 2] = 0.05
        scenario = dataclasses.replace(scenario, compute_s=compute_s)
    pilots = [Watched(rank, grid) for rank in range(4)]
    simulate(scenario, policies=pilots)
    assert all(pilot.scales == pilots[0].scales for pilot in pilots)
    scales = [pilots[0].scales[seq] for seq in range(ops)]
    assert scales[: 2 * LR_PERIOD_OPS - 1] == [1.0] * (2 * LR_PERIOD_OPS - 1)
    expected = 1 / (1 + pilots[0].spending.recent.total)
    assert scales[-1] == pytest.approx(expected, abs=0.05)
    assert scales[-1] < 0.95


def test_an_offer_holds_from_its_period_on_and_only_then_comes_the_next() -> None:
    offer = LrOffer(offers=True)
    for seq in range(2 * LR_PERIOD_OPS):
        offer.after(op(seq), Epsilon(quantized=0.25))
        assert offer.scale == 1.0
    assert offer.latest == LrScale(pytest.approx(0.8), 2)
    offer.after(op(2 * LR_PERIOD_OPS), Epsilon(quantized=1.0))
    assert (offer.scale, offer.latest) == (0.8, LrScale(0.8, 2))
    offer.after(op(3 * LR_PERIOD_OPS), Epsilon(quantized=1.0))
    assert (offer.scale, offer.latest) == (0.8, LrScale(0.5, 5))


def test_an_offer_that_holds_for_long_is_made_again_before_its_period_wraps() -> None:
    offer = LrOffer(offers=True)
    for period in range(3 << 15):
        offer.after(op(period * LR_PERIOD_OPS), Epsilon(quantized=0.25))
    assert offer.scale == 0.8
    assert offer.latest is not None
    assert (3 << 15) % (1 << 16) - offer.latest.period < 1 << 13


def test_a_rank_takes_the_latest_that_it_hears_whatever_it_counts_itself() -> None:
    offer = LrOffer(offers=False)
    offer.after(op(63, lr_scale=LrScale(0.9, 2)), Epsilon(quantized=0.5))
    offer.after(op(64, lr_scale=LrScale(0.5, 1)), Epsilon(quantized=0.5))
    assert (offer.scale, offer.latest) == (1.0, LrScale(0.9, 2))
    offer.after(op(128), Epsilon(quantized=0.5))
    assert offer.scale == 0.9


def test_a_scale_from_the_network_is_between_nothing_and_one() -> None:
    for scale, reason in (
        (0.0, ""),
        (0.5, ""),
        (1.0, ""),
        (1.5, "shape"),
        (0.01, "shape"),
        (-1.0, "shape"),
        (np.nan, "shape"),
    ):
        header = _native.Header()
        header.type, header.lr_scale, header.lr_period = 2, scale, 7
        parsed, found = _native.parse_header(header.pack())
        assert found == reason
        if not reason:
            assert (parsed.lr_scale, parsed.lr_period) == (scale, 7)


# ---- grids -----------------------------------------------------------------------------------------------
def test_in_a_grid_the_columns_owner_decides_with_how_many_planes_all_rows_send_a_mean() -> None:
    """Ranks that have come to other numbers: replicas are equal all the same."""
    planes = {rank: 3 + rank for rank in range(8)}
    scenario = Scenario(ranks=8, rows=2, length=1 << 18, ops=2, codec="planes", planes_by_rank=planes)
    simulation = simulate(scenario)
    for results in simulation.results:
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
