"""t_C: the grace follows the loss that it causes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailcut.policy.deadline import WARM_UP
from tailcut.policy.early_exit import FIRST_PERCENT, LEAST_PERCENT, MOST_PERCENT, EarlyExit

USUAL_S = 0.2
BOUND_S = 1.0


def warm(took_s: float = USUAL_S) -> EarlyExit:
    early_exit = EarlyExit()
    for _ in range(WARM_UP):
        early_exit.after(took_s, 5e-4, "all")  # between the thresholds: the percentage stays
    return early_exit


def test_there_is_no_early_exit_before_the_usual_time_is_known() -> None:
    early_exit = EarlyExit()
    for _ in range(WARM_UP - 1):
        early_exit.after(USUAL_S, 0.0, "all")
    assert early_exit.grace_s(BOUND_S) == BOUND_S


def test_the_grace_starts_at_a_tenth_of_the_usual_time() -> None:
    assert warm().grace_s(BOUND_S) == pytest.approx(FIRST_PERCENT / 100 * USUAL_S)


def test_the_grace_doubles_with_loss_up_to_half_of_the_usual_time() -> None:
    early_exit = warm()
    graces_s = []
    for _ in range(4):
        early_exit.after(USUAL_S, 0.002, "grace")
        graces_s.append(early_exit.grace_s(BOUND_S))
    assert graces_s == pytest.approx([0.2 * USUAL_S, 0.4 * USUAL_S, 0.5 * USUAL_S, 0.5 * USUAL_S])


@pytest.mark.parametrize("ended_by", ["all", "grace"])
def test_the_grace_falls_by_a_percent_without_loss_and_never_to_nothing(ended_by: str) -> None:
    early_exit = warm()
    early_exit.after(USUAL_S, 0.00009, ended_by)
    assert early_exit.percent == FIRST_PERCENT - 1
    for _ in range(100):
        early_exit.after(USUAL_S, 0.0, ended_by)
    assert early_exit.percent == LEAST_PERCENT


@pytest.mark.parametrize("loss", [0.0001, 0.001])
def test_the_grace_stays_between_the_thresholds(loss: float) -> None:
    early_exit = warm()
    early_exit.after(USUAL_S, loss, "grace")
    assert early_exit.percent == FIRST_PERCENT


@pytest.mark.parametrize("ended_by", ["bound", "deadline"])
def test_what_a_straggler_costs_is_not_blamed_on_the_grace(ended_by: str) -> None:
    early_exit = warm()
    early_exit.after(USUAL_S, 0.2, ended_by)
    assert early_exit.percent == FIRST_PERCENT


def test_a_slow_first_op_does_not_lengthen_the_grace() -> None:
    early_exit = EarlyExit()
    for seq in range(WARM_UP):
        early_exit.after(USUAL_S if seq else 10 * USUAL_S, 5e-4, "all")
    assert early_exit.average_s == USUAL_S


def test_the_average_keeps_95_parts_of_100() -> None:
    early_exit = warm()
    early_exit.after(2 * USUAL_S, 0.0, "all")
    assert early_exit.average_s == pytest.approx(1.05 * USUAL_S)


def test_an_op_whose_times_are_unknown_leaves_the_average() -> None:
    early_exit = warm()
    early_exit.after(None, 0.0, "bound")
    assert early_exit.average_s == USUAL_S


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(0, 1e6),
            st.floats(0, 1),
            st.sampled_from(["all", "grace", "bound", "deadline"]),
        ),
        max_size=40,
    ),
    st.floats(1e-6, 100),
)
def test_a_grace_is_positive_and_never_longer_than_the_bound(
    ops: list[tuple[float | None, float, str]], bound_s: float
) -> None:
    early_exit = EarlyExit()
    for took_s, loss, ended_by in ops:
        early_exit.after(took_s, loss, ended_by)
        assert 0 < early_exit.grace_s(bound_s) <= bound_s
        assert LEAST_PERCENT <= early_exit.percent <= MOST_PERCENT
