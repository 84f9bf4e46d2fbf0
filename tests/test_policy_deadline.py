"""t_B: learned from stage times, never from those that it cut itself. Closed loops, seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailcut.policy.deadline import CUT_FACTOR, MARGIN, TAIL_OPS, WARM_UP, WINDOW, StageBound, fixed

MOST_S = 10.0
USUAL_S = 0.1
SIGMAS = (0.05, 0.1, 0.2)


class Loop:
    """Stages that take ``time_s(op)``, with noise, and are cut at t_B; their true times may be told later."""

    def __init__(
        self, time_s: Callable[[int], float], sigma: float, seed: int, tells_after: int | None
    ) -> None:
        self.bound = StageBound(0.0, MOST_S)
        self.bounds_s: list[float] = []
        self.cuts = 0
        self._time_s = time_s
        self._random = random.Random(seed)
        self._sigma = sigma
        self._tells_after = tells_after
        self._told: list[tuple[int, float]] = []

    def run(self, ops: int) -> list[float]:
        """t_B after each op."""
        for seq in range(len(self.bounds_s), len(self.bounds_s) + ops):
            took_s = self._time_s(seq) * self._random.lognormvariate(0.0, self._sigma)
            if took_s <= self.bound.bound_s:
                self.bound.completed(seq, took_s)
            else:
                self.cuts += 1
                self.bound.cut(seq, self.bound.bound_s)
                self._told.append((seq, took_s))
            while (
                self._tells_after is not None and self._told and self._told[0][0] <= seq - self._tells_after
            ):
                self.bound.came_late(*self._told.pop(0))
            self.bounds_s.append(self.bound.bound_s)
        return self.bounds_s


@pytest.fixture(params=[None, 0, 2], ids=["late-never-told", "told-at-once", "told-2-ops-later"])
def tells_after(request: pytest.FixtureRequest) -> int | None:
    return request.param


def test_the_warm_up_is_generous_and_then_the_bound_is_a_margin_over_what_stages_take() -> None:
    bound = StageBound(0.0, MOST_S)
    for seq in range(WARM_UP - 1):
        bound.completed(seq, USUAL_S)
        assert bound.bound_s == MOST_S
    bound.completed(WARM_UP, USUAL_S)
    assert bound.bound_s == pytest.approx((1 + MARGIN) * USUAL_S)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_slow_first_op_neither_lengthens_nor_shortens_the_bound(sigma: float) -> None:
    for seed in range(50):
        with_it = Loop(lambda seq: USUAL_S if seq else 10 * USUAL_S, sigma, seed, None).run(WARM_UP + WINDOW)
        after = with_it[WARM_UP:]
        assert max(after) < 4 * USUAL_S
        assert min(after) > USUAL_S


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_link_5_times_slower_and_its_recovery_are_followed_within_20_ops(
    sigma: float, tells_after: int | None
) -> None:
    for seed in range(50):
        loop = Loop(lambda seq: 5 * USUAL_S if 50 <= seq < 120 else USUAL_S, sigma, seed, tells_after)
        bounds_s = loop.run(200)
        assert all(bound_s > 5 * USUAL_S for bound_s in bounds_s[70:120])
        assert all(USUAL_S < bound_s < 4 * USUAL_S for bound_s in bounds_s[140:])


@pytest.mark.parametrize(("sigma", "most_cut"), [(0.1, 0.04), (0.3, 0.12), (1.0, 0.18)])
def test_few_stages_are_cut_however_much_their_times_vary(
    sigma: float, most_cut: float, tells_after: int | None
) -> None:
    loops = [Loop(lambda _: USUAL_S, sigma, seed, tells_after) for seed in range(20)]
    for loop in loops:
        loop.run(500)
    assert sum(loop.cuts for loop in loops) / (20 * 500) < most_cut


def test_cuts_alone_never_shorten_the_bound() -> None:
    loop = Loop(lambda seq: USUAL_S if seq < 50 else math.inf, 0.1, 1, None)
    bounds_s = loop.run(80)
    assert all(later >= earlier for earlier, later in pairwise(bounds_s[49:]))
    assert bounds_s[-1] == MOST_S


def known(took_s: float = USUAL_S, ops: int = WINDOW) -> StageBound:
    """After so many stages that took so long."""
    bound = StageBound(0.0, MOST_S)
    for seq in range(-ops, 0):
        bound.completed(seq, took_s)
    return bound


def test_a_bound_that_cuts_every_stage_finds_their_time_within_20_ops() -> None:
    bound = known(0.01 * USUAL_S)
    for seq in range(20):
        if bound.bound_s < USUAL_S:
            bound.cut(seq, bound.bound_s)
    assert bound.bound_s >= USUAL_S


def test_a_burst_that_cuts_a_few_stages_in_a_row_does_not_lengthen_the_bound() -> None:
    bound = known()
    before_s = bound.bound_s
    for seq in range(TAIL_OPS):
        bound.cut(seq, before_s)
    assert bound.bound_s == before_s
    bound.cut(TAIL_OPS, before_s)
    assert bound.bound_s >= CUT_FACTOR * before_s


def test_cuts_that_are_not_in_a_row_count_each() -> None:
    bound = known()
    for seq in range(4):
        assert bound.bound_s < CUT_FACTOR * USUAL_S
        bound.cut(2 * seq, bound.bound_s)
        bound.completed(2 * seq + 1, USUAL_S)
    assert bound.bound_s > CUT_FACTOR * USUAL_S


def test_what_late_packets_tell_counts_instead_of_a_guess() -> None:
    bound = known()
    for seq in range(TAIL_OPS + 1):
        bound.cut(seq, bound.bound_s)
    for seq in range(TAIL_OPS + 1):
        bound.came_late(seq, 1.3 * USUAL_S)
    assert bound.bound_s == pytest.approx((1 + MARGIN) * 1.3 * USUAL_S)


def test_news_of_a_stage_that_is_long_over_is_ignored() -> None:
    bound = known()
    bound.cut(0, 1.0)
    for seq in range(1, WINDOW + 1):
        bound.completed(seq, USUAL_S)
    before_s = bound.bound_s
    bound.came_late(0, 9.0)
    for seq in range(20, 20 + TAIL_OPS):
        bound.cut(seq, USUAL_S)
    assert bound.bound_s == before_s


def test_a_stage_that_the_deadline_cut_short_of_usual_says_nothing() -> None:
    bound = known()
    before_s = bound.bound_s
    for seq in range(WINDOW):
        bound.cut(seq, 0.01 * USUAL_S)
    assert bound.bound_s == before_s


@given(st.lists(st.tuples(st.sampled_from(["completed", "cut", "late"]), st.floats(0, 1e6)), max_size=60))
def test_the_bound_is_finite_and_within_its_limits_whatever_comes(events: list[tuple[str, float]]) -> None:
    bound = StageBound(0.05, MOST_S)
    for seq, (event, took_s) in enumerate(events):
        if event == "completed":
            bound.completed(seq, took_s)
        elif event == "late":
            bound.came_late(seq // 2, took_s)
        else:
            bound.cut(seq, took_s)
        assert 0.05 <= bound.bound_s <= MOST_S


@given(st.lists(st.floats(0, 100), min_size=WARM_UP, max_size=40), st.integers(0, 39), st.floats(0, 100))
def test_a_longer_stage_never_shortens_the_bound(times_s: list[float], at: int, more_s: float) -> None:
    def bound_s(times_s: list[float]) -> float:
        bound = StageBound(0.0, 1e9)
        for seq, took_s in enumerate(times_s):
            bound.completed(seq, took_s)
        return bound.bound_s

    longer_s = list(times_s)
    longer_s[at % len(longer_s)] += more_s
    assert bound_s(longer_s) >= bound_s(times_s)


def test_fixed_bounds_divide_the_deadline_and_leave_early_exit_out() -> None:
    bounds = fixed(4.0)
    assert (bounds.scatter_s, bounds.scatter_cap_s, bounds.gather_s) == (2.0, 3.0, 4.0)
    assert bounds.scatter_grace_s >= bounds.scatter_cap_s
    assert bounds.gather_grace_s >= bounds.gather_s
