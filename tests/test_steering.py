"""The policies together: terms from reports, in closed loops with a model of the ops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailcut.mirror import LateCompletion
from tailcut.policy.deadline import (
    LEAST_MARGIN_S,
    LEAST_SHARED_MARGIN_S,
    LEAST_SURE_MARGIN_S,
    MARGIN,
    WARM_UP,
    fixed,
)
from tailcut.policy.steering import ABSENT_SHARE, MOST_SIZES, FixedSteering, Steering
from tailcut.report import Report, Verdict
from tests.reports import NEVER, lost, op

DEADLINE_S = 10.0
CALM = (0.0, 0.1, 0.1, 0.1)


def with_margin(took_s: float) -> float:
    """t_B of stages that all take so long."""
    return took_s + max(MARGIN * took_s, LEAST_MARGIN_S)


def steering(ranks: int = 4, cls: type[Steering] = Steering) -> Steering:
    return cls(rank=0, members=range(ranks), deadline_s=DEADLINE_S)


def play(
    pilot: Steering,
    ops: int,
    scatter_s: Sequence[float] | Callable[[int], Sequence[float]] = CALM,
    length: int = 1000,
    **figures,
) -> list[Report]:
    """Ops of the model, each under the bounds that the ones before it led to."""
    reports = []
    for seq in range(ops):
        times_s = scatter_s(seq) if callable(scatter_s) else scatter_s
        report = op(times_s, bounds=pilot.bounds(length), seq=seq, length=length, **figures)
        reports.append(pilot.after(report, now_s=float(seq)))
    return reports


def test_before_anything_is_known_the_deadline_is_divided() -> None:
    pilot = steering()
    for length in (0, 1000, (1 << 32) - 1):
        bounds = pilot.bounds(length)
        assert bounds[:3] == fixed(DEADLINE_S)[:3]
        assert bounds.scatter_grace_s == bounds.scatter_s
        assert bounds.gather_grace_s == bounds.gather_s
    assert pilot.incast == 0


def test_after_the_warm_up_stages_are_waited_for_little_longer_than_they_take() -> None:
    pilot = steering()
    play(pilot, WARM_UP)
    bounds = pilot.bounds(1000)
    assert bounds.scatter_s == pytest.approx(with_margin(0.1))
    assert bounds.scatter_grace_s < bounds.scatter_s
    assert bounds.scatter_cap_s == fixed(DEADLINE_S).scatter_cap_s
    assert bounds.deadline_s == DEADLINE_S


def test_who_has_not_entered_is_waited_for_a_quarter_of_a_step_while_the_budget_has_room() -> None:
    pilot = steering()
    assert pilot.bounds(1000).absent_s == 0.0  # the step is not known
    for seq in range(WARM_UP):  # steps of 0.2 s, in which half is SCATTER
        report = op((0, 0.1, 0.1, 0.1), bounds=pilot.bounds(1000), seq=seq, length=1000)
        pilot.after(report, now_s=0.2 * seq)
    assert pilot.bounds(1000).absent_s == pytest.approx(ABSENT_SHARE * 0.2)
    pilot.hurried = False
    assert pilot.bounds(1000).absent_s == 0.0


def test_gather_has_time_for_all_bytes_of_a_mean_whose_owner_waited_until_its_bound() -> None:
    pilot = steering()
    play(pilot, 10, gather_s=(0, 0.02, 0.02, 0.02))
    assert pilot.bounds(1000).gather_s >= 0.1  # as long as SCATTER of the same bytes takes


def test_short_ops_have_the_margin_that_a_host_needs() -> None:
    pilot = steering()
    play(pilot, 30, (0, 1e-5, 1e-5, 1e-5))
    assert pilot.bounds(1000).scatter_s == pytest.approx(LEAST_MARGIN_S, rel=1e-2)
    assert pilot.bounds(1000, carried=False).scatter_s == pytest.approx(LEAST_SURE_MARGIN_S, rel=1e-2)


def test_both_stages_together_end_an_eighth_later_than_usual() -> None:
    pilot = steering()
    play(pilot, 30, (0, 0.5, 0.5, 0.5))
    bounds = pilot.bounds(1000)
    assert bounds.scatter_s == pytest.approx((1 + MARGIN) * 0.5)
    assert bounds.scatter_s + bounds.gather_s == pytest.approx((1 + MARGIN) * 1.0)


def test_on_one_host_ops_are_waited_for_twice_as_long() -> None:
    """It is its processors that they wait for. A rank that has not entered is left out as elsewhere."""
    pilot = Steering(rank=0, members=range(4), deadline_s=DEADLINE_S, one_host=True)
    play(pilot, 30)
    assert pilot.bounds(1000).scatter_s == pytest.approx(0.1 + LEAST_SHARED_MARGIN_S)
    assert pilot.bounds(1000).absent_s > 0
    play(pilot, 30, (0, 0.4, 0.4, 0.4))
    assert pilot.bounds(1000).scatter_s == pytest.approx(2 * 0.4)
    play(pilot, 30, (0, 1e-4, 1e-4, 1e-4))
    assert pilot.bounds(1000).scatter_s > LEAST_SHARED_MARGIN_S


def test_while_what_is_late_costs_too_much_ops_are_waited_for_twice_as_long() -> None:
    pilot = steering()
    play(pilot, 30)
    pilot.hurried = False
    bounds = pilot.bounds(1000)
    assert bounds.scatter_s == pytest.approx(2 * 0.1)
    assert bounds.scatter_s + bounds.gather_s == pytest.approx(2 * 0.2)


def test_a_dead_rank_does_not_lengthen_bounds() -> None:
    pilot = steering()
    play(pilot, 30)
    dead = (0, 0.1, 0.1, NEVER)
    gone = {"entered_s": (0, 0, 0, NEVER)}
    play(pilot, 2, dead, **gone)
    assert pilot.bounds(1000).scatter_s == pytest.approx(with_margin(0.1))
    reports = play(pilot, 20, dead, silent=[3], **gone)
    assert {report.scatter.ended_by for report in reports} == {"grace"}
    assert pilot.bounds(1000).scatter_s == pytest.approx(with_margin(0.1))
    assert pilot.drop_share[3] > 0.4


def test_ops_that_lack_an_eighth_teach_nothing() -> None:
    """They moved fewer bytes, and look fast."""
    pilot = steering()
    play(pilot, 30)
    before = pilot.bounds(1000)
    play(pilot, 30, (0, 0.05, 0.05, NEVER), silent=[3], gather_s=(0, 0.05, 0.05, NEVER))
    assert pilot.bounds(1000)[:3] == before[:3]


def test_a_stage_that_lacks_only_who_abstained_is_not_a_cut_one() -> None:
    pilot = steering()
    play(pilot, 30)
    before_s = pilot.bounds(1000).scatter_s
    play(pilot, 30, abstained=(3,), scatter_lost=(0, 0, 0, 1), scatter_ended_by="bound")
    assert pilot.bounds(1000).scatter_s == before_s


def test_a_rank_alone_among_silent_ones_learns_nothing() -> None:
    pilot = steering()
    play(pilot, 30)
    before_s = pilot.bounds(1000).scatter_s
    play(pilot, 30, (0, NEVER, NEVER, NEVER), silent=[1, 2, 3], majority_entered_s=0.0)
    play(pilot, 1)
    assert pilot.bounds(1000).scatter_s == before_s


def test_a_rank_whose_port_is_closed_waits_no_longer_than_usual() -> None:
    """Nothing will come in time, and the others wait until this rank says that it has no mean."""
    pilot = steering()
    pilot.hurried = False
    play(pilot, 30)
    play(pilot, 1, (0, NEVER, NEVER, NEVER), silent=[1, 2, 3], majority_entered_s=0.0)
    bounds = pilot.bounds(1000)
    assert bounds.scatter_s == pytest.approx(0.1)
    assert bounds.scatter_s + bounds.gather_s == pytest.approx(0.2)


def test_a_rank_that_is_not_awaited_changes_no_bound() -> None:
    pilot = steering()
    play(pilot, 30)
    usual = pilot.bounds(1000)
    play(pilot, 30, entered_s=(0, 0, 0, NEVER), gather_s=CALM, unawaited=[3])
    assert pilot.bounds(1000).scatter_s == pytest.approx(usual.scatter_s)
    assert pilot.bounds(1000).gather_s == pytest.approx(usual.gather_s)
    assert pilot.drop_share[3] == pytest.approx(0.5)
    assert pilot.verdicts[3] == {"on time": 30, "compute-late": 30}


def test_a_lone_late_rank_is_not_waited_for_longer() -> None:
    pilot = steering()
    play(pilot, 30)
    reports = play(pilot, 12, entered_s=(0, 0, 0, 0.6))
    assert {report.scatter.ended_by for report in reports} == {"bound"}
    assert pilot.bounds(1000).scatter_s < 0.2
    assert reports[-1].verdicts == (*[Verdict.ON_TIME] * 3, Verdict.COMPUTE_LATE)


def test_when_most_ranks_are_late_the_network_has_changed() -> None:
    pilot = steering()
    play(pilot, 30)
    play(pilot, 20, (0, 0.5, 0.5, 0.5))
    assert pilot.bounds(1000).scatter_s > 0.5
    play(pilot, 20)
    assert pilot.bounds(1000).scatter_s < 0.2


def test_two_late_ranks_of_four_are_no_change_of_the_network() -> None:
    """Two ports are blocked at once. Of three and of two, two late ones are most."""
    for ranks, changed in ((4, False), (3, True)):
        pilot = steering(ranks)
        play(pilot, 30, (0, *[0.1] * (ranks - 1)))
        before_s = pilot.bounds(1000).scatter_s
        play(pilot, 6, (0, *[0.1] * (ranks - 3), 0.5, 0.5))
        assert (pilot.bounds(1000).scatter_s > 1.5 * before_s) is changed


def test_late_completions_take_the_place_of_what_was_cut() -> None:
    pilot = steering()
    cut = play(pilot, 5)
    for seq in range(100, 120):
        report = op((0, 0.1, 0.1, NEVER), bounds=pilot.bounds(1000), seq=seq, gather_s=CALM)
        cut.append(pilot.after(report, now_s=float(seq)))
    assert cut[5].scatter.ended_by == "bound"
    assert pilot.bounds(1000).scatter_s > with_margin(0.2)
    late = tuple(LateCompletion(seq, "scatter", 1000, 0.13) for seq in range(100, 120))
    pilot.after(op(CALM, bounds=pilot.bounds(1000), seq=120, late=late), now_s=120.0)
    assert pilot.bounds(1000).scatter_s == pytest.approx(with_margin(0.13))


def test_sizes_learn_apart_and_the_latest_are_kept() -> None:
    pilot = steering()
    play(pilot, 20, (0, 0.1, 0.1, 0.1), length=1000)
    play(pilot, 20, (0, 0.8, 0.8, 0.8), length=8000)
    assert pilot.bounds(1000).scatter_s == pytest.approx(with_margin(0.1))
    assert pilot.bounds(8000).scatter_s == pytest.approx(with_margin(0.8))
    assert pilot.known_bounds.keys() == {1000, 8000}
    for length in range(10_000, 10_000 + MOST_SIZES):
        play(pilot, 1, length=length)
    assert len(pilot.known_bounds) == MOST_SIZES
    assert 1000 not in pilot.known_bounds


def test_a_new_size_starts_from_the_nearest_one_scaled_up_but_never_down() -> None:
    pilot = steering()
    play(pilot, 20, length=1000)
    known_s = pilot.bounds(1000).scatter_s
    assert pilot.bounds(4000).scatter_s == pytest.approx(4 * known_s)
    assert pilot.bounds(10).scatter_s == pytest.approx(known_s)
    assert pilot.bounds(1 << 31).scatter_s == fixed(DEADLINE_S).scatter_s


def test_one_lossy_link_is_no_incast_and_many_are() -> None:
    pilot = steering(ranks=8)
    play(pilot, 24, [0.1] * 8, received_lost=(0, 0.5, 0, 0, 0, 0, 0, 0))
    assert pilot.incast == 0
    play(pilot, 8, [0.1] * 8, received_lost=(0, *[0.06] * 7))
    assert pilot.incast == 4


def test_what_is_missing_at_a_cut_counts_where_packets_are_lost() -> None:
    few, none = (0, *[0.015] * 7), (0,) * 8
    for received_lost, incast in ((few, 4), (none, 0)):
        pilot = steering(ranks=8)
        cut = {"gather_ended_by": "bound", "gather_lost": (0, *[0.2] * 7)}
        play(pilot, 16, [0.1] * 8, received_lost=received_lost, **cut)
        assert pilot.incast == incast


def test_a_stage_that_stragglers_made_late_is_no_incast() -> None:
    pilot = steering()
    play(pilot, 20)
    play(pilot, 2, entered_s=(0, 0, 5, 5), gather_s=CALM)
    assert pilot.incast == 0


def test_senders_that_are_only_late_are_no_incast() -> None:
    pilot = steering(8)
    play(pilot, 20, [0.1] * 8)
    play(pilot, 1, [0, 0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4], gather_s=[0.1] * 8)
    assert pilot.incast == 0


def test_an_op_behind_teaches_nothing() -> None:
    pilot = steering()
    play(pilot, 20)
    before = pilot.bounds(1000)
    report = Report(7, "behind", 1000, 3.0, behind_ops=70, lost_frac=1.0)
    assert pilot.after(report, 0.0) is report
    assert pilot.bounds(1000) == before


def test_alarms_are_taken_once() -> None:
    pilot = steering()
    play(pilot, 60, (0, 0.1, 0.1, NEVER), entered_s=(0, 0, 0, NEVER), silent=[3])
    (alarm,) = pilot.take_alarms()
    assert "rank 3" in alarm
    assert pilot.take_alarms() == []


def test_without_adaption_bounds_stay_and_verdicts_are_given() -> None:
    pilot = steering(cls=FixedSteering)
    reports = play(pilot, 30, (0, 0.1, 0.1, 0.7), gather_s=CALM)
    assert pilot.bounds(1000) == fixed(DEADLINE_S)
    assert pilot.incast == 0
    assert reports[-1].verdicts[3] == Verdict.NETWORK_LATE
    assert "5 s for SCATTER" in pilot.describe()
    assert "little longer than ops usually take" in steering().describe()


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_a_group_of_one_and_empty_buckets_are_steered_too(length: int) -> None:
    for ranks in (1, 2):
        pilot = steering(ranks)
        play(pilot, 30, [0.0] * ranks, length=length)
        assert pilot.bounds(length).scatter_s == pytest.approx(LEAST_MARGIN_S)
        assert pilot.incast == 0


def test_a_group_with_a_tail_loses_few_contributions_and_no_step_lasts_long() -> None:
    random_ = random.Random(5)
    pilot = steering(8)

    def tail(_: int) -> list[float]:
        return [
            0.1 * random_.lognormvariate(0, 0.3) * (10 if random_.random() < 0.01 else 1) for _ in range(8)
        ]

    reports = play(pilot, 500, tail, gather_s=[0.1] * 8)[20:]
    share = sum(sum(lost(report, "scatter")) for report in reports) / (7 * len(reports))
    assert share < 0.05
    elapsed_s = sorted(report.elapsed_s for report in reports)
    assert elapsed_s[int(0.99 * len(elapsed_s))] < 1.0


RANK_TIMES = st.one_of(st.floats(0, 20), st.just(NEVER))


@settings(max_examples=60)
@given(
    st.integers(1, 5).flatmap(
        lambda ranks: st.lists(
            st.tuples(
                st.lists(RANK_TIMES, min_size=ranks, max_size=ranks),
                st.lists(st.floats(-5, 5) | st.just(NEVER), min_size=ranks, max_size=ranks),
                st.sets(st.integers(1, ranks), max_size=ranks),
                st.sampled_from([0, 1, 1000, 1 << 20]),
            ),
            min_size=1,
            max_size=25,
        )
    )
)
def test_bounds_are_positive_ordered_and_within_the_deadline_whatever_comes(ops) -> None:
    ranks = len(ops[0][0])
    pilot = steering(ranks)
    for seq, (times_s, entered_s, silent, length) in enumerate(ops):
        report = op(
            times_s,
            entered_s=entered_s,
            bounds=pilot.bounds(length),
            seq=seq,
            length=length,
            silent=[rank for rank in silent if rank < ranks],
        )
        judged = pilot.after(report, float(seq))
        assert len(judged.verdicts) == ranks
        for size in (0, 1, 1000, 1 << 25):
            bounds = pilot.bounds(size)
            assert all(0 < bound_s <= DEADLINE_S for bound_s in bounds[:-1])
            assert 0 <= bounds.absent_s <= bounds.scatter_s
            assert bounds.scatter_s <= bounds.scatter_cap_s
            assert bounds.scatter_grace_s <= bounds.scatter_s
            assert bounds.gather_grace_s <= bounds.gather_s
        assert 0 <= pilot.incast <= max(0, ranks - 2)
