"""t_B: learned from ops that nothing has disturbed, not from those that it cut. Closed loops, seeded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailcut.policy.deadline import (
    CALM,
    HURRIED,
    LATE_OPS,
    LEAST_MARGIN_S,
    LONGER,
    MARGIN,
    SURE,
    WARM_UP,
    WINDOW,
    OpBound,
    Usual,
    Wait,
    fixed,
)

MOST_S = 10.0
USUAL_S = 0.1
"""Of an op; half of it is SCATTER."""
NO_SKEW = 1.0


class Loop:
    """Ops that take ``time_s(op)``, with noise, and are cut at t_B; their true times may be told later."""

    def __init__(
        self,
        time_s: Callable[[int], float],
        sigma: float,
        seed: int,
        tells_after: int | None = None,
        *,
        most: bool = False,
        wait: Wait = HURRIED,
    ) -> None:
        self.bound = OpBound(fixed(MOST_S))
        self.bounds_s: list[float] = []
        self.late: list[float] = []
        """By op: the share of its time that was cut off."""
        self._time_s, self._sigma, self._random = time_s, sigma, random.Random(seed)
        self._most, self._wait = most, wait
        self._tells_after = tells_after
        self._told: list[tuple[int, float]] = []

    def run(self, ops: int) -> list[float]:
        """t_B of both stages together, before each op."""
        for seq in range(len(self.bounds_s), len(self.bounds_s) + ops):
            bound_s = sum(self.bound.bounds(self._wait, NO_SKEW))
            took_s = self._time_s(seq) * self._random.lognormvariate(0.0, self._sigma)
            cut = took_s > bound_s
            self.bounds_s.append(bound_s)
            self.late.append(max(0.0, 1 - bound_s / took_s))
            self.bound.scatter.note(seq, min(took_s, bound_s) / 2, cut=cut)
            self.bound.whole.note(seq, min(took_s, bound_s), cut=cut)
            self.bound.ended(most_late=cut and self._most)
            if cut:
                self._told.append((seq, took_s))
            while (
                self._tells_after is not None and self._told and self._told[0][0] <= seq - self._tells_after
            ):
                late, late_s = self._told.pop(0)
                self.bound.scatter.correct(late, late_s / 2)
                self.bound.whole.correct(late, late_s)
        return self.bounds_s


@pytest.fixture(params=[None, 0, 2], ids=["late-never-told", "told-at-once", "told-2-ops-later"])
def tells_after(request: pytest.FixtureRequest) -> int | None:
    return request.param


def test_the_warm_up_is_generous_and_then_the_bound_is_a_margin_over_what_ops_take() -> None:
    bounds_s = Loop(lambda _: USUAL_S, 0.0, 0).run(WARM_UP + 1)
    assert bounds_s[WARM_UP - 1] == MOST_S + 0.5 * MOST_S
    assert bounds_s[WARM_UP] == pytest.approx((1 + MARGIN) * USUAL_S)


def test_short_ops_have_the_least_margin() -> None:
    bounds_s = Loop(lambda _: 1e-4, 0.0, 0).run(WARM_UP + 1)
    assert LEAST_MARGIN_S < bounds_s[WARM_UP] < 2.1 * LEAST_MARGIN_S


@pytest.mark.parametrize("every", [2, 3, 10])
def test_bursts_in_up_to_every_second_op_do_not_lengthen_the_bound(every: int) -> None:
    """Late parts tell how long the ops would have taken."""
    calm = Loop(lambda _: USUAL_S, 0.05, 1).run(200)
    bursts = Loop(lambda seq: USUAL_S * (5 if seq % every == 0 else 1), 0.05, 1, 1).run(200)
    assert sum(bursts[40:]) < 1.1 * sum(calm[40:])


def test_a_slow_first_op_does_not_lengthen_it() -> None:
    for seed in range(50):
        bounds_s = Loop(lambda seq: USUAL_S if seq else 50 * USUAL_S, 0.1, seed).run(WARM_UP + WINDOW)
        assert max(bounds_s[WARM_UP:]) < 2 * USUAL_S


@pytest.mark.parametrize("sigma", [0.05, 0.1])
def test_a_network_5_times_slower_and_its_recovery_are_followed_within_20_ops(
    sigma: float, tells_after: int | None
) -> None:
    for seed in range(50):
        slow = Loop(
            lambda seq: 5 * USUAL_S if 50 <= seq < 120 else USUAL_S, sigma, seed, tells_after, most=True
        )
        bounds_s = slow.run(200)
        assert min(bounds_s[70:120]) > 4 * USUAL_S
        assert min(bounds_s[76:120]) > 5 * USUAL_S
        assert max(bounds_s[140:]) < 2 * USUAL_S


def test_a_lone_late_rank_does_not_lengthen_the_bound_for_long() -> None:
    """It is late for 15 ops, and what it brings then is carried."""
    bounds_s = Loop(lambda seq: 8 * USUAL_S if 50 <= seq < 65 else USUAL_S, 0.02, 1, 3).run(100)
    assert max(bounds_s[50:63]) < 1.5 * USUAL_S
    assert max(bounds_s[80:]) < 1.5 * USUAL_S


@pytest.mark.parametrize(("sigma", "most_late"), [(0.05, 0.005), (0.1, 0.01), (0.3, 0.05)])
def test_little_is_late_however_much_times_vary(
    sigma: float, most_late: float, tells_after: int | None
) -> None:
    late = [share for seed in range(20) for share in _late(Loop(lambda _: USUAL_S, sigma, seed, tells_after))]
    assert sum(late) / len(late) < most_late


def _late(loop: Loop) -> list[float]:
    loop.run(500)
    return loop.late[WARM_UP:]


def test_the_bound_does_not_shrink_by_its_own_cuts() -> None:
    """From completed ops alone a low percentile would collapse."""
    for sigma in (0.1, 0.3):
        bounds_s = Loop(lambda _: USUAL_S, sigma, 3, None).run(2000)
        assert min(bounds_s[WARM_UP:]) > 0.7 * USUAL_S


def test_where_what_is_cut_is_lost_trouble_in_a_third_of_the_ops_is_waited_for() -> None:
    def bound_s(wait: Wait) -> float:
        return Loop(lambda seq: USUAL_S * (3 if seq % 3 == 0 else 1), 0.0, 0, wait=wait).run(60)[-1]

    assert bound_s(SURE) > 3 * USUAL_S > bound_s(CALM) > bound_s(HURRIED)


def test_most_ranks_late_in_5_ops_in_a_row_lengthen_it_and_4_do_not() -> None:
    bound = OpBound(fixed(MOST_S))
    for seq in range(WINDOW):
        bound.scatter.note(seq, USUAL_S / 2)
        bound.whole.note(seq, USUAL_S)
    before_s = sum(bound.bounds(HURRIED, NO_SKEW))
    for late in (*[True] * (LATE_OPS - 1), False, *[True] * (LATE_OPS - 1)):
        bound.ended(most_late=late)
        assert sum(bound.bounds(HURRIED, NO_SKEW)) == before_s
    bound.ended(most_late=True)
    assert sum(bound.bounds(HURRIED, NO_SKEW)) == pytest.approx(LONGER * before_s)


def test_ranks_that_enter_apart_are_waited_for_up_to_a_limit() -> None:
    bound = OpBound(fixed(MOST_S))
    for seq in range(WINDOW):
        bound.scatter.note(seq, USUAL_S / 2)
        bound.whole.note(seq, USUAL_S)
        bound.entered(seq, 0.04 if seq % 4 == 0 else 0.0)
    apart_s = sum(bound.bounds(HURRIED, 0.05))
    assert apart_s == pytest.approx((1 + MARGIN) * USUAL_S + 0.04)
    assert sum(bound.bounds(HURRIED, 0.01)) == pytest.approx((1 + MARGIN) * USUAL_S + 0.01)


def test_news_of_an_op_that_is_long_over_is_ignored() -> None:
    usual = Usual()
    for seq in range(WINDOW + 1):
        usual.note(seq, USUAL_S)
    usual.correct(0, 9.0)
    assert usual.at(100) == USUAL_S


@given(
    st.lists(st.tuples(st.sampled_from(["note", "late", "entered", "most"]), st.floats(0, 1e6)), max_size=60),
    st.sampled_from([HURRIED, CALM, SURE]),
)
def test_bounds_are_positive_and_within_the_deadline_whatever_comes(
    events: list[tuple[str, float]], wait: Wait
) -> None:
    bound = OpBound(fixed(MOST_S))
    for seq, (event, took_s) in enumerate(events):
        if event == "note":
            bound.scatter.note(seq, took_s / 2)
            bound.whole.note(seq, took_s)
        elif event == "late":
            bound.whole.correct(seq // 2, took_s)
        elif event == "entered":
            bound.entered(seq, took_s)
        else:
            bound.ended(most_late=True)
        scatter_s, gather_s = bound.bounds(wait, 0.1)
        assert 0 < scatter_s <= 0.5 * MOST_S
        assert 0 < gather_s <= MOST_S


def test_fixed_bounds_divide_the_deadline_and_leave_early_exit_out() -> None:
    bounds = fixed(4.0)
    assert (bounds.scatter_s, bounds.scatter_cap_s, bounds.gather_s) == (2.0, 3.0, 4.0)
    assert bounds.scatter_grace_s >= bounds.scatter_cap_s
    assert bounds.gather_grace_s >= bounds.gather_s
