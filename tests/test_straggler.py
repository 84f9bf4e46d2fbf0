"""Verdicts: who was late, and why; and one loud word about a rank that is dropped too often."""

from __future__ import annotations

import pytest

from tailcut.policy.deadline import fixed
from tailcut.policy.straggler import LEAST_OPS, WINDOW, Stragglers, arrivals_s, judge
from tailcut.report import Report, Verdict
from tests.reports import NEVER, op

ON_TIME, COMPUTE_LATE, NETWORK_LATE = Verdict.ON_TIME, Verdict.COMPUTE_LATE, Verdict.NETWORK_LATE
LOSSY_FROM, LOSSY_TO, SILENT = Verdict.LOSSY_FROM, Verdict.LOSSY_TO, Verdict.SILENT
SHORT = fixed(10.0)._replace(scatter_s=0.3, gather_s=0.6)
CALM = (0.0, 0.1, 0.1, 0.1)


def verdicts(report: Report, usual_s: float = 0.1) -> tuple[Verdict, ...]:
    return judge(report, 0, arrivals_s(report.links, "scatter", 0), usual_s, 0.005)


def test_ranks_that_come_together_are_on_time() -> None:
    assert verdicts(op([0, 0.1, 0.12, 0.09])) == (ON_TIME,) * 4


@pytest.mark.parametrize("bounds", [None, SHORT], ids=["waited-for", "cut"])
def test_a_rank_that_enters_late_is_compute_late(bounds) -> None:
    report = op([0, 0.1, 0.1, 0.1], entered_s=[0, 0, 0, 0.25], bounds=bounds)
    assert verdicts(report) == (ON_TIME, ON_TIME, ON_TIME, COMPUTE_LATE)


def test_a_rank_that_has_not_entered_but_serves_its_shard_is_compute_late() -> None:
    report = op([0, 0.1, 0.1, 0.1], gather_s=[0.1] * 4, entered_s=[0, 0, 0, 5], bounds=SHORT)
    assert report.links[3].entered_s is None
    assert verdicts(report)[3] == COMPUTE_LATE


def test_a_rank_whose_packets_take_long_is_network_late() -> None:
    assert verdicts(op([0, 0.1, 0.1, 0.4], gather_s=CALM)) == (ON_TIME, ON_TIME, ON_TIME, NETWORK_LATE)


def test_both_sides_of_late() -> None:
    assert verdicts(op([0, 0.1, 0.1, 0.149], gather_s=CALM))[3] == ON_TIME
    assert verdicts(op([0, 0.1, 0.1, 0.151], gather_s=CALM))[3] == NETWORK_LATE


def test_lateness_shorter_than_the_least_does_not_count() -> None:
    assert verdicts(op([0, 0.001, 0.001, 0.005])) == (ON_TIME,) * 4


def test_a_rank_that_entered_on_time_and_whose_packets_were_still_coming_at_the_cut_is_network_late() -> None:
    report = op(
        [0, 0.1, 0.1, 0.4],
        gather_s=CALM,
        bounds=SHORT,
        entered_s=[0] * 4,
        scatter_lost=(0, 0, 0, 0.3),
        scatter_last_s=(None, 0.1, 0.1, 0.29),
    )
    assert verdicts(report)[3] == NETWORK_LATE


def test_a_rank_whose_packets_had_stopped_when_the_bound_cut_has_a_lossy_link() -> None:
    report = op(
        [0, 0.1, 0.1, 0.4],
        gather_s=CALM,
        bounds=SHORT,
        scatter_lost=(0, 0, 0, 0.01),
        scatter_last_s=(None, 0.1, 0.1, 0.11),
    )
    assert report.scatter.ended_by == "bound"
    assert verdicts(report)[3] == LOSSY_FROM


@pytest.mark.parametrize("stage", ["scatter", "gather"])
def test_what_is_missing_after_the_grace_is_lost_on_the_link_from_it(stage: str) -> None:
    figures = {f"{stage}_lost": (0, 0, 0.02, 0), f"{stage}_ended_by": "grace"}
    assert verdicts(op(CALM, **figures)) == (ON_TIME, ON_TIME, LOSSY_FROM, ON_TIME)


def test_a_mean_that_has_not_come_at_all_by_the_bound_is_late() -> None:
    assert verdicts(op(CALM, gather_s=[0, 0.1, 0.1, NEVER], bounds=SHORT))[3] == NETWORK_LATE


@pytest.mark.parametrize(("lost", "verdict"), [(0.01, ON_TIME), (0.011, LOSSY_TO)])
def test_the_link_to_a_rank_is_judged_by_what_was_lost_on_the_way(lost: float, verdict: Verdict) -> None:
    assert verdicts(op(CALM, sent_lost=(0, 0, lost, 0))) == (ON_TIME, ON_TIME, verdict, ON_TIME)


def test_a_rank_of_which_nothing_came_is_silent_at_once() -> None:
    report = op([0, 0.1, 0.1, NEVER], entered_s=[0, 0, 0, NEVER], bounds=SHORT)
    assert verdicts(report)[3] == SILENT


def test_a_rank_called_silent_is_silent_whatever_else() -> None:
    assert verdicts(op(CALM, silent=[2]))[2] == SILENT


def test_an_abstaining_rank_is_not_late() -> None:
    report = op(CALM, abstained=(3,), scatter_lost=(0, 0, 0, 1), scatter_ended_by="bound")
    assert verdicts(report) == (ON_TIME,) * 4


@pytest.mark.parametrize("closed_before_it_came", [False, True])
def test_a_rank_finds_itself_compute_late(closed_before_it_came: bool) -> None:
    figures = {"closed_s": -0.1, "scatter_lost": (1, 0, 0, 0)} if closed_before_it_came else {}
    report = op([0, 0.01, 0.01, 0.01], entered_s=[0, -0.5, -0.5, -0.5], **figures)
    assert verdicts(report) == (COMPUTE_LATE, ON_TIME, ON_TIME, ON_TIME)


def test_a_rank_whose_own_contribution_missed_the_close_by_little_is_compute_late_too() -> None:
    report = op(CALM, entered_s=[0, -0.01, -0.01, -0.01], scatter_lost=(1, 0, 0, 0), scatter_ended_by="bound")
    assert verdicts(report) == (COMPUTE_LATE, ON_TIME, ON_TIME, ON_TIME)


def test_in_a_group_of_two_the_usual_time_takes_the_place_of_the_median() -> None:
    assert verdicts(op([0, 0.4], gather_s=[0, 0.1]), usual_s=0.1) == (ON_TIME, NETWORK_LATE)
    assert verdicts(op([0, 0.4], gather_s=[0, 0.1]), usual_s=0.4) == (ON_TIME, ON_TIME)


def test_a_group_of_one_is_on_time() -> None:
    assert verdicts(op([0])) == (ON_TIME,)


def test_a_report_without_links_has_no_verdicts() -> None:
    assert verdicts(Report(0, "complete", 10, 0.1)) == ()


def watch(stragglers: Stragglers, ops: int, dropped_every: int = 0, rank: int = 2) -> list[str]:
    late = op([0, 0.1, 0.1, 0.1], gather_s=CALM, entered_s=[0, 0, 5, 0], bounds=SHORT)
    calm = op(CALM)
    told = []
    for k in range(1, ops + 1):
        report = late if dropped_every and k % dropped_every == 0 else calm
        told += stragglers.after(report, verdicts(report))
    return told


def test_a_rank_dropped_in_more_than_its_share_is_told_once_with_share_verdict_and_remedy() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    (text,) = watch(stragglers, 500, dropped_every=4)
    assert "rank 2" in text
    assert "25%" in text
    assert "compute-late" in text
    assert "less work" in text


def test_a_rank_dropped_within_its_share_is_not_told() -> None:
    assert watch(Stragglers(range(4), share=0.2), 500, dropped_every=5) == []


def test_nothing_is_told_before_there_are_ops_enough() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    assert watch(stragglers, LEAST_OPS - 1, dropped_every=1) == []
    assert len(watch(stragglers, 1, dropped_every=1)) == 1


def test_a_relapse_is_told_again_only_after_a_recovery() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    assert len(watch(stragglers, WINDOW, dropped_every=3)) == 1
    watch(stragglers, 50)
    assert watch(stragglers, WINDOW, dropped_every=3) == []  # it was at 17 % in between: no recovery
    watch(stragglers, WINDOW)
    assert len(watch(stragglers, WINDOW, dropped_every=3)) == 1


def test_the_verdict_told_is_that_of_the_latest_ops() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    watch(stragglers, 1000, dropped_every=10)
    gone = op([0, 0.1, NEVER, 0.1], entered_s=[0, 0, NEVER, 0], bounds=SHORT)
    told = [text for _ in range(30) for text in stragglers.after(gone, verdicts(gone))]
    assert len(told) == 1
    assert "silent" in told[0]


def test_the_share_is_of_the_window() -> None:
    stragglers = Stragglers(range(4), share=1.0)
    watch(stragglers, 3 * WINDOW, dropped_every=1)
    watch(stragglers, WINDOW // 4)
    assert stragglers.drop_share == (0, 0, 0.75, 0)


def test_a_contribution_that_lacks_a_little_is_not_dropped() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    for _ in range(50):
        report = op(CALM, scatter_lost=(0, 0, 0.5, 0), scatter_ended_by="grace")
        assert stragglers.after(report, verdicts(report)) == []
    assert stragglers.drop_share == (0, 0, 0, 0)


def test_an_abstaining_rank_is_not_dropped() -> None:
    stragglers = Stragglers(range(4), share=0.2)
    for _ in range(50):
        report = op(CALM, abstained=(2,), scatter_lost=(0, 0, 1, 0), scatter_ended_by="bound")
        assert stragglers.after(report, verdicts(report)) == []


def test_verdicts_are_counted_by_rank() -> None:
    stragglers = Stragglers(range(4), share=1.0)
    watch(stragglers, 10, dropped_every=5)
    assert stragglers.counts == (
        {"on time": 10},
        {"on time": 10},
        {"on time": 8, "compute-late": 2},
        {"on time": 10},
    )
