"""Whom a stage awaits: a rank that is stuck, dead, slow or busy costs its contribution and nobody's time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailcut import Freeze, Report, Scenario, Simulation, _native, simulate
from tailcut.policy.deadline import LEAST_MARGIN_S, to_native
from tailcut.simulation.network import Bursts, RateChange
from tailcut.simulation.scenario import Hang
from tailcut.stats import OpBounds
from tests import oracle

COMPUTE_S = 0.01
OPS = 150
FROM_S = 0.5  # the trouble begins
AFTER = 40  # and the bounds have been learned


def run(ranks: int, **more: Any) -> Simulation:
    return simulate(
        Scenario(
            **{
                "ranks": ranks,
                "length": 20_000,
                "ops": OPS,
                "compute_s": np.full((OPS, ranks), COMPUTE_S),
                "bytes_per_s": 1e8,
                "delay_s": 1e-4,
                "deadline_s": 10.0,
                "buckets": 1,
                "steering": True,
                "elided": True,
                "window_ops": 1024,
                "pool_bytes": 64 << 20,
                **more,
            }
        )
    )


def times_s(reports: list[Report]) -> np.ndarray:
    return np.array([report.elapsed_s for report in reports])


def without(rank: int, reports: list[Report]) -> list[Report]:
    """The reports from the first op on that the rank's contribution is missing from."""
    first = next(i for i, report in enumerate(reports) if report.links[rank].scatter.missing)
    return reports[first:]


TROUBLES = ("stuck", "dead")


def happening(trouble: str, rank: int) -> dict[str, Any]:
    if trouble == "stuck":
        return {"hangs": [Hang(rank, FROM_S, 1e6)]}
    return {"freezes": [Freeze(rank, FROM_S, None)]}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_from_the_third_op_on_the_others_are_as_fast_as_before(trouble: str, ranks: int) -> None:
    usual_s = np.median(times_s(run(ranks).reports(0)))
    simulation = run(ranks, **happening(trouble, ranks - 1))
    oracle.check_deadlines(simulation)
    for rank in range(ranks - 1):
        reports = without(ranks - 1, simulation.reports(rank))
        assert len(reports) > 50
        assert times_s(reports[2:]).max() <= 1.05 * usual_s


@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_op_of_the_change_waits_for_its_bounds_once(trouble: str) -> None:
    simulation = run(4, **happening(trouble, 3))
    for rank in range(3):
        reports = without(3, simulation.reports(rank))
        assert times_s(reports).max() <= 2 * 0.06  # a bound of each stage, which has a floor of deadline/200


def test_a_stuck_rank_serves_its_shard_and_nothing_of_the_mean_is_lost() -> None:
    simulation = run(4, hangs=[Hang(3, FROM_S, 1e6)])
    for rank in range(3):
        assert all(report.lost_frac == 0 for report in simulation.reports(rank))


def test_a_rank_is_awaited_until_two_ops_in_a_row_lacked_it() -> None:
    simulation = run(4, hangs=[Hang(3, FROM_S, 1e6)])
    awaited = [report.links[3].awaited for report in without(3, simulation.reports(0))]
    assert awaited[:2] == [True, True]
    assert not any(awaited[2:])


def test_a_rank_that_comes_back_is_awaited_again_as_soon_as_it_is_on_time() -> None:
    """It was busy for half a second, and takes the means that it has missed without computing."""
    compute_s = np.full((OPS, 4), COMPUTE_S)
    compute_s[60, 3] = 0.5
    compute_s[61:, 3] = 0.0005
    simulation = run(4, compute_s=compute_s)
    links = [report.links[3] for report in simulation.reports(0)]
    assert any(not link.awaited for link in links)
    assert all(link.awaited and not link.scatter.missing for link in links[-10:])


def test_a_rank_that_evaluates_every_so_often_costs_two_bounds_each_time_and_lengthens_none() -> None:
    compute_s = np.full((OPS, 4), COMPUTE_S)
    compute_s[AFTER::30, 0] = 0.5
    compute_s[AFTER + 1 :, 0] = np.where(compute_s[AFTER + 1 :, 0] == COMPUTE_S, 0.0005, 0.5)
    usual_s = np.median(times_s(run(4).reports(1)))
    simulation = run(4, compute_s=compute_s)
    reports = simulation.reports(1)
    assert np.median(times_s(reports)) <= 1.05 * usual_s
    slow = times_s(reports)[AFTER:] > 1.05 * usual_s
    evaluations = len(range(AFTER, OPS, 30))
    assert slow.sum() <= 2 * evaluations
    cut = [report.scatter.took_s or 0.0 for report in reports if report.scatter.ended_by != "all"]
    assert max(cut) <= 0.06


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_nobody_waits_for_a_rank_that_has_said_it_is_away(ranks: int) -> None:
    usual_s = times_s(run(ranks).reports(1)).max()
    compute_s = np.full((OPS, ranks), COMPUTE_S)
    compute_s[50:, 0] = 0.0005  # it takes the means of what it has missed
    simulation = run(ranks, compute_s=compute_s, hangs=[Hang(0, FROM_S, FROM_S + 0.5, announced=True)])
    for rank in range(1, ranks):
        reports = simulation.reports(rank)
        missed = [report for report in reports if report.links[0].scatter.missing]
        assert len(missed) > 30
        assert not any(report.links[0].awaited for report in missed)
        assert times_s(missed[:30]).max() <= 1.05 * usual_s  # when it is back, it sends what is late
        assert all(report.lost_frac == 0 for report in missed)  # its engine has served its shard
        assert reports[-1].links[0].awaited


def test_who_comes_back_first_does_not_go_on_alone() -> None:
    """All evaluate, rank 0 for less time than the others."""
    hangs = [Hang(rank, FROM_S, FROM_S + (0.5 if rank else 0.48), announced=True) for rank in range(4)]
    simulation = run(4, hangs=hangs)
    for rank in range(4):
        assert not any(link.scatter.missing for report in simulation.reports(rank) for link in report.links)


def test_of_two_ranks_none_goes_on_alone() -> None:
    simulation = run(2, hangs=[Hang(0, FROM_S, FROM_S + 0.5, announced=True)])
    awaited = [report.links[0].awaited for report in without(0, simulation.reports(1))]
    assert awaited[:2] == [True, True]


def test_a_rank_twice_as_slow_holds_nobody_up() -> None:
    """It is later than the bound allows: by the time that an op takes to compute."""
    compute_s = np.full((OPS, 4), 10 * COMPUTE_S)
    usual_s = np.median(times_s(run(4, compute_s=compute_s).reports(0)))
    compute_s[AFTER:, 3] *= 2
    reports = without(3, run(4, compute_s=compute_s).reports(0))
    assert len(reports) > 50
    assert np.median(times_s(reports[2:])) <= 1.05 * usual_s
    assert times_s(reports[2:]).max() <= 1.15 * usual_s  # one in which late contributions came


def test_a_contribution_within_the_bound_counts_also_after_an_early_close() -> None:
    """Rank 3 enters after the others have closed without it, and well within the bound."""
    compute_s = np.full((OPS, 4), COMPUTE_S)
    compute_s[60, 3] = 0.5
    compute_s[61:, 3] = 0.0005
    compute_s[101, 3] = 0.016  # it catches up
    links = [report.links[3] for report in run(4, compute_s=compute_s).reports(0)]
    assert not links[104].awaited
    assert links[104].scatter.missing == links[104].scatter.coords
    assert links[105].awaited


def test_if_most_ranks_are_late_it_is_the_network_and_all_that_entered_are_awaited() -> None:
    """All links become ten times slower: nobody is left out for it."""
    simulation = run(4, rate_changes=[RateChange(FROM_S, None, 0.1, 0.1)])
    links = [link for report in simulation.reports(0)[-20:] for link in report.links]
    assert all(link.awaited for link in links)
    assert not any(link.scatter.missing for link in links)


def blocked_ports(**more: Any) -> list[Report]:
    """As in ``bursts``: a port is blocked for 0.8 s every few seconds."""
    ops, rate = 300, 25e6
    simulation = run(
        4, length=800_000, codec="planes", planes=4, ops=ops, compute_s=np.full((ops, 4), 0.05), paced=True,
        bytes_per_s=rate, queue_bytes=24_000_000, frame_bytes=42, packet_bytes=1400,
        bursts=Bursts(volume_bytes=20_000_000, gap_min_s=4.0, gap_mean_s=10.0), **{"budget": 0.2, **more},
    )  # fmt: skip
    return [report for rank in range(4) for report in simulation.reports(rank)]


def test_an_owner_whose_port_is_blocked_is_not_waited_for() -> None:
    """It lives, and what it sends comes, but it has no contributions. So it says at its bound that it has no
    mean, and does not give its own contribution for one."""
    reports = blocked_ports()
    without_a_mean = [report for report in reports if report.gather.empty and not report.gather.missing]
    assert len(without_a_mean) > 50
    assert all(report.ended_by == "all" for report in without_a_mean)
    assert np.median(times_s(without_a_mean)) < 1.3 * np.median(times_s(reports))


def test_a_rank_that_hears_nobody_goes_on_at_the_usual_pace() -> None:
    """It must not run ahead of the others: it is they who are there, and its port that is closed."""
    usual_s = np.median(times_s(run(4).reports(0)))
    simulation = run(4, freezes=[Freeze(rank, FROM_S, None) for rank in (1, 2, 3)])
    reports = without(3, simulation.reports(0))
    assert all(silent for report in reports[3:] for silent in [report.links[1].silent])
    assert times_s(reports[4:]).min() >= 0.99 * usual_s
    assert times_s(reports[4:]).max() <= usual_s + LEAST_MARGIN_S


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_most_ranks_stuck_the_others_do_not_wait_either(ranks: int) -> None:
    usual_s = np.median(times_s(run(ranks).reports(0)))
    hangs = [Hang(rank, FROM_S, 1e6) for rank in range(1, ranks)]
    reports = without(ranks - 1, run(ranks, hangs=hangs).reports(0))
    # The owner of a shard that is stuck lacks the one contribution that needs no network.
    assert times_s(reports[2:]).max() <= 1.15 * usual_s


def test_a_grid_awaits_within_its_rows() -> None:
    usual_s = np.median(times_s(run(16, rows=4, buckets=0).reports(0)))
    reports = run(16, rows=4, buckets=0, hangs=[Hang(3, FROM_S, 1e6)]).reports(0)
    assert np.median(times_s(reports[-50:])) <= 1.05 * usual_s


# ---- who has not entered -----------------------------------------------------------------------------------


class Leaving:
    """A policy with long bounds that leaves ranks out which have not entered after 20 ms."""

    def terms(self, length: int) -> _native.Terms:
        return _native.Terms(to_native(OpBounds(2, 3, 2, 1, 1, 4, absent_s=0.02)), 16)

    def after(self, report: Report, now_s: float) -> None: ...


def leaving(ranks: int, busy: dict[int, float], **more: Any) -> list[Report]:
    """The reports of rank 0. In op 5 some ranks compute for longer."""
    compute_s = np.full((12, ranks), 0.1)
    for rank, longer_s in busy.items():
        compute_s[5, rank] += longer_s
    scenario = {"length": 20_000, "ops": 12, "bytes_per_s": 1e8, "deadline_s": 4.0, "buckets": 1, **more}
    simulation = simulate(
        Scenario(ranks=ranks, compute_s=compute_s, **scenario), policies=[Leaving() for _ in range(ranks)]
    )
    return simulation.reports(0)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_rank_that_has_not_entered_is_left_out_soon_after_all_others_have_delivered(ranks: int) -> None:
    report = leaving(ranks, {ranks - 1: 1.0})[5]
    assert report.scatter.ended_by == "absent"
    assert report.links[ranks - 1].scatter.missing
    assert 0.02 <= (report.scatter.took_s or 0.0) < 0.03
    assert report.elapsed_s < 0.04
    assert report.lost_frac == 0


def test_a_rank_that_enters_meanwhile_is_waited_for() -> None:
    report = leaving(4, {3: 0.015})[5]
    assert report.scatter.ended_by == "all"
    assert not report.scatter.missing


def test_half_of_the_ranks_are_waited_for() -> None:
    report = leaving(4, {2: 0.5, 3: 0.5})[5]
    assert report.scatter.ended_by == "all"
    assert (report.scatter.took_s or 0.0) > 0.4


def test_one_of_two_ranks_is_waited_for() -> None:
    assert leaving(2, {1: 0.5})[5].scatter.ended_by == "all"


@pytest.mark.parametrize("more", [{"buckets": 0}, {"late": "discard"}])
def test_where_nothing_is_carried_a_rank_that_has_not_entered_is_waited_for(more: dict[str, Any]) -> None:
    assert leaving(4, {3: 0.5}, **more)[5].scatter.ended_by == "all"


def test_a_rank_that_has_entered_is_waited_for_while_its_link_is_slow() -> None:
    reports = leaving(4, {}, rate_changes=[RateChange(0.55, 3, 0.01, 1.0), RateChange(0.75, 3, 1.0, 1.0)])
    slow = max(reports, key=lambda report: report.elapsed_s)
    assert slow.elapsed_s > 0.05
    assert all(report.scatter.ended_by == "all" for report in reports)


def test_what_has_waited_in_front_of_a_port_is_no_word_of_now() -> None:
    """A port becomes fifty times slower for a while, and what comes through is old. Its rank does not take it
    for a sign that the others are still to enter: their bounds hold for it."""
    slow = 3
    simulation = run(
        4,
        length=1 << 18,
        compute_s=np.full((OPS, 4), 0.02),
        codec="planes",
        planes=2,
        packet_bytes=1408,
        bytes_per_s=25e6,
        delay_s=0.0,
        queue_bytes=24_000_000,
        paced=True,
        rate_changes=[RateChange(2.0, slow, downlink_factor=0.02), RateChange(2.6, slow)],
    )
    took_s = [times_s(simulation.reports(rank)[30:]) for rank in range(4)]
    assert (
        took_s[slow] > 0.1
    ).sum() <= 1  # one, behind the others, in which it takes what has come meanwhile
    assert max(took_s[0]) < 0.1
