"""tailcut.stats: totals as a person reads them."""

from __future__ import annotations

import pytest

from tailcut import Stats


def test_totals_fit_on_one_line():
    stats = Stats(
        ops=4,
        deadline_ops=1,
        partial_ops=3,
        coordinates=1000,
        lost_coordinates=25,
        sent_bytes=2_510_000_000,
        received_bytes=999,
    )
    assert (
        str(stats)
        == "4 ops, 1 ended by the deadline, 2.50% of the results lost, 3 means without somebody's part; "
        "2.51 GB sent, 999 B received"
    )
    assert "contributes nothing until resynced" in str(Stats(contributing=False))


def test_ranks_that_were_often_at_fault_are_named_the_worst_first():
    stats = Stats(
        verdicts=(
            {"on time": 1000},
            {"on time": 990, "network-late": 10},
            {"on time": 900, "compute-late": 60, "silent": 40},
            {"on time": 980, "lossy link to it": 20},
        )
    )
    notes = str(stats).split("; ")[2:]
    assert notes == [
        "rank 2: compute-late in 60 ops, silent in 40 ops",
        "rank 3: lossy link to it in 20 ops",
    ]


def test_derived_values_are_no_counts():
    counts = Stats(verdicts=({"on time": 1},), drop_share=(0.0,)).counts()
    assert not {"bounds", "verdicts", "drop_share"} & counts.keys()


@pytest.mark.parametrize(("lost", "coordinates", "share"), [(0, 0, 0.0), (1, 4, 0.25)])
def test_lost_share_is_of_all_results(lost, coordinates, share):
    assert Stats(lost_coordinates=lost, coordinates=coordinates).lost_frac == share
