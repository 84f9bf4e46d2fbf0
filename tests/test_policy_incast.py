"""How many senders at once: no limit until several of them lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailcut.policy.incast import MOST_ON_THE_WIRE, Incast


def test_a_rank_starts_without_a_limit() -> None:
    assert [Incast(ranks).advertised for ranks in (1, 2, 8, 256, 257, 1000)] == [0] * 6


def test_loss_halves_the_senders_down_to_one() -> None:
    incast = Incast(9)
    advertised = []
    for _ in range(5):
        incast.after(0.03)
        advertised.append(incast.advertised)
    assert advertised == [4, 2, 1, 1, 1]


def test_calm_ops_add_a_sender_each_until_there_is_no_limit() -> None:
    incast = Incast(9)
    incast.after(1.0)
    advertised = []
    for _ in range(5):
        incast.after(0.0)
        advertised.append(incast.advertised)
    assert advertised == [5, 6, 7, 0, 0]


def test_a_link_that_loses_a_percent_changes_nothing() -> None:
    incast = Incast(9)
    incast.after(1.0)
    incast.after(0.01)
    assert incast.advertised == 4


def test_a_port_that_holds_a_few_senders_gets_about_so_many() -> None:
    holds = 5
    incast = Incast(33)
    senders = []
    for _ in range(200):
        crowd = incast.senders
        incast.after(0.05 if crowd > holds else 0.0)
        senders.append(crowd)
    assert set(senders[20:]) <= {3, 4, 5, 6}


def test_the_most_that_can_be_advertised_is_followed_by_no_limit() -> None:
    incast = Incast(1000)
    incast.after(1.0)
    assert incast.advertised == 128
    advertised = []
    for _ in range(MOST_ON_THE_WIRE):
        incast.after(0.0)
        advertised.append(incast.advertised)
    assert advertised[126:129] == [255, 0, 0]


@given(st.integers(1, 2000), st.lists(st.floats(0, 1), max_size=50))
def test_the_advertised_number_fits_the_wire_and_the_group(ranks: int, losses: list[float]) -> None:
    incast = Incast(ranks)
    for loss in losses:
        incast.after(loss)
        assert 0 <= incast.advertised <= min(max(1, ranks - 1), MOST_ON_THE_WIRE)
        assert incast.senders >= 1
