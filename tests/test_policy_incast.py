"""How many senders at once: no limit until several of them lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailcut.policy.incast import FIRST_REST, LOSS_HIGH, LOSS_LOW, MOST_ON_THE_WIRE, REST, TRIAL_OPS, Incast


def test_a_rank_starts_without_a_limit() -> None:
    assert [Incast(ranks).advertised for ranks in (1, 2, 8, 256, 257, 1000)] == [0] * 6


def settled(ranks: int) -> Incast:
    """That has seen the first ops of a group, in which paths find their rates."""
    incast = Incast(ranks)
    for _ in range(FIRST_REST * TRIAL_OPS - TRIAL_OPS):
        incast.after(0.02)
    return incast


def after(incast: Incast, loss: float, trials: int = 1) -> list[int]:
    """What is advertised after each of so many trials in which every op had this loss."""
    advertised = []
    for _ in range(trials):
        for _ in range(TRIAL_OPS):
            incast.after(loss)
        advertised.append(incast.advertised)
    return advertised


def test_loss_halves_the_senders_down_to_the_fewest() -> None:
    for ranks, falls in ((101, [50, 40, 40]), (9, [4, 4, 4])):
        incast = settled(ranks)
        assert [after(incast, loss)[0] for loss in (0.08, 0.07, 0.06)] == falls


def test_a_group_of_few_is_never_limited() -> None:
    assert after(settled(5), 1.0, trials=3) == [0, 0, 0]


def test_calm_trials_add_a_sender_each_until_there_is_no_limit() -> None:
    incast = settled(9)
    after(incast, 1.0)
    assert after(incast, 0.0, trials=5) == [5, 6, 7, 0, 0]


def test_a_limit_that_does_not_lower_the_loss_is_lifted_and_rests() -> None:
    incast = settled(33)
    assert after(incast, 0.06) == [16]
    assert after(incast, 0.07, trials=REST) == [0] * REST
    assert after(incast, 0.07) == [16]


def test_a_limit_that_lowers_the_loss_stays() -> None:
    incast = settled(33)
    assert after(incast, 0.07) == [16]
    assert after(incast, 0.06, trials=9) == [12] * 9


def test_the_first_ops_do_not_count() -> None:
    assert after(Incast(33), 1.0, trials=FIRST_REST - 1) == [0] * (FIRST_REST - 1)


def test_one_op_alone_changes_nothing() -> None:
    incast = settled(9)
    for loss in (0.3, *[0.0] * (TRIAL_OPS - 1)) * 5:
        incast.after(loss)
        assert incast.advertised == 0


def test_a_loss_between_the_thresholds_keeps_the_number() -> None:
    incast = settled(33)
    after(incast, 1.0)
    assert after(incast, (LOSS_LOW + LOSS_HIGH) / 2, trials=3) == [16, 16, 16]


def test_links_that_lose_a_percent_at_random_are_not_limited() -> None:
    assert after(settled(33), 0.012, trials=5) == [0] * 5


def test_a_port_that_holds_some_senders_gets_about_so_many() -> None:
    holds = 20
    incast = settled(33)
    senders = []
    for _ in range(100):
        senders.append(incast.senders)
        after(incast, 0.06 if incast.senders > holds else 0.0)
    assert set(senders[2:]) == {*range((holds + 1) // 2 + 2, holds + 2)}


def test_the_most_that_can_be_advertised_is_followed_by_no_limit() -> None:
    incast = settled(1000)
    assert after(incast, 1.0) == [128]
    assert after(incast, 0.0, trials=130)[126:129] == [255, 0, 0]


@given(st.integers(1, 2000), st.lists(st.floats(0, 1), max_size=50))
def test_the_advertised_number_fits_the_wire_and_the_group(ranks: int, losses: list[float]) -> None:
    incast = Incast(ranks)
    for loss in losses:
        incast.after(loss)
        assert 0 <= incast.advertised <= min(max(1, ranks - 1), MOST_ON_THE_WIRE)
        assert incast.senders >= 1
